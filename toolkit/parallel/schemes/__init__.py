"""Layouts by the name of their scheme: what each parameter is to it, and how that cuts it.

roles.py     path of a parameter -> its part in tensor parallelism (a table)
degrees.py   ZeRO: into how many parts weights, gradients and moments are cut, and along what
scheme.py    `layout`, the one entry point
"""

from toolkit.parallel.schemes.scheme import layout

__all__ = ["layout"]
