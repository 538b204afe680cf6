"""The rooms of the package from the ground up; `tests/test_imports.py` holds them to it."""

# Room -> the rooms it may import. What is not named here may be imported by none.
FLOORS = {
    "attention": set(),
    "experts": {"attention"},
    "measure": set(),
    "schedules": {"measure"},
    "figures": {"measure"},
    "parallel": {"attention", "experts", "figures", "measure", "schedules"},
    "lr": {"figures", "measure", "parallel"},
    "training": {"lr", "measure", "parallel"},
    "looped": {"attention", "experts", "measure", "parallel"},
    "testing": {"attention", "looped"},
    "eject": {"attention"},
    "conversion": {"looped", "training"},
    "language": {"attention", "experts", "looped", "measure", "parallel", "schedules", "training"},
    "planning": {"attention", "experts", "looped", "measure", "parallel", "schedules", "training"},
    "serving": {"language", "looped", "measure", "parallel", "planning", "schedules", "training"},
}
GROUND_TO_LANGUAGE = set(FLOORS)
FLOORS |= {
    "experiments": GROUND_TO_LANGUAGE,
    "bench": GROUND_TO_LANGUAGE,
    "lab": GROUND_TO_LANGUAGE | {"bench", "experiments"},
    "cli": GROUND_TO_LANGUAGE | {"bench", "experiments", "lab"},
}
