"""One judge a file; the registry `holdfast.evaluation.judge.JUDGES` imports every module here."""
