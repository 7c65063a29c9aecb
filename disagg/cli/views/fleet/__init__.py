"""What the commands in `disagg.cli.fleet.lifecycle` show."""
