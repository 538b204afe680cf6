"""Instruments of serving: requests in time, and the load at which their bounds break."""
