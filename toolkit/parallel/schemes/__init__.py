"""Layouts by the name of their scheme: the role of each parameter, and its sharding.

roles.py     path of a parameter -> its role in tensor parallelism (a table)
degrees.py   ZeRO: degrees and axes of weights, gradients and moments
scheme.py    `layout`, the one entry point
"""

from toolkit.parallel.schemes.scheme import layout

__all__ = ["layout"]
