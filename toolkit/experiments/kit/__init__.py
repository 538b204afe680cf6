"""What all experiments share: settings and runs, records, verdicts, figures."""
