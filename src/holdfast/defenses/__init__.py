"""One file per defense; the registry imports this folder."""
