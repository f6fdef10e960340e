"""The fourteen harm categories of BeaverTails, in the order of beaver-dam's outputs."""

CATEGORIES: tuple[str, ...] = (
    "animal_abuse", "child_abuse", "controversial_topics,politics", "discrimination,stereotype,injustice",
    "drug_abuse,weapons,banned_substance", "financial_crime,property_crime,theft", "hate_speech,offensive_language",
    "misinformation_regarding_ethics,laws_and_safety", "non_violent_unethical_behavior", "privacy_violation",
    "self_harm", "sexually_explicit,adult_content", "terrorism,organized_crime",
    "violence,aiding_and_abetting,incitement",
)  # fmt: skip
