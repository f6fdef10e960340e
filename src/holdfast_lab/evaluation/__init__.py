"""How harmful and how useful a model's replies are, and judges that are trained."""
