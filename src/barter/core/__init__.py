"""Building blocks of algorithms: parties, models, images, payloads, records."""
