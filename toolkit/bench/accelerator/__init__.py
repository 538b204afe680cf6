"""Every kernel of an accelerator checked, then timed beside peers, by one command."""
