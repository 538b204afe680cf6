"""The instrument of pipelines: a schedule that plays, can be changed by hand, and is compiled."""
