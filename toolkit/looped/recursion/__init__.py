"""Mixture-of-Recursions: a router decides how many loops each token takes.

routing.py   the routers, what loops hand on, one loop over the tokens that take it
loss.py      training: the choice of tokens that a loop makes, and the routers' own losses
"""
