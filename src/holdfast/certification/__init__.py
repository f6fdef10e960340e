"""Statistics of the claim: exact tests, bounds, sample sizes, comparisons, and the certificate made of them."""
