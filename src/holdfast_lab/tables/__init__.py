"""Tables and figures from the results of a study: numbers in, text out; no torch."""
