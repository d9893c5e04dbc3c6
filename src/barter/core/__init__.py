"""Building blocks of algorithms: parties, models, images, payloads, remote calls and records."""
