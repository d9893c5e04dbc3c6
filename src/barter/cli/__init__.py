"""The command line. Importing `barter.cli.app` does not load torch; a command does so when it has work to do."""
