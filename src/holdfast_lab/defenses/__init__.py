"""Baselines, one file each; the registry of defenses imports this folder."""
