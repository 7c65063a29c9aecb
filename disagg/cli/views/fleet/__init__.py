"""What the commands in `disagg.cli.fleet` show."""
