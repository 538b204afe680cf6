"""The command `toolkit`: one file per group of subcommands."""
