"""kubectl as a transport: `get --raw` and its kin."""
