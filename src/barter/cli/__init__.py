"""The command line; importing `barter.cli.app` does not load torch.

Commands that compute load it.
"""
