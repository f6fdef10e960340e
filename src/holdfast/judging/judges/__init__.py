"""One judge a file; the registry `holdfast.judging.judge.JUDGES` imports every module here."""
