"""The command line. Importing `barter.cli.app` does not load torch; commands that compute do."""
