"""What somebody who sees all that clients tell can learn of their images: attacks on a run, by the experimenter."""
