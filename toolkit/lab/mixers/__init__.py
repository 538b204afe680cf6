"""Linear-time mixers on one text: state, effective memory, decay and cost."""
