"""Shared code of all experiments: settings and runs, records, verdicts, figures."""
