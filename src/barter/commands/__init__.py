"""What the commands of the command line do. Importing them loads torch: `cli` does so when there is something to do."""
