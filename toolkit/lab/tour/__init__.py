"""`toolkit tour`: the whole story on this machine, as one page."""
