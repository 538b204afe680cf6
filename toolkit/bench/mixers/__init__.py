"""Recurrent mixers against their scans, other libraries and the machine; decoding steps."""
