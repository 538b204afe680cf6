"""A setting that a config.json leaves out means what their configuration class makes of it.

Or it is refused, or the tensors' shapes would not fit: then `load_checkpoint` refuses the model.
"""

import json

import pytest
from test_attention_families import CASES
from test_attention_families import SIZES as ATTENTION_SIZES
from test_mixtures import MODELS as MIXTURES
from test_mixtures import SIZES as MIXTURE_SIZES
from test_recurrent_families import MODELS as RECURRENT
from test_recurrent_families import SIZES as RECURRENT_SIZES
from tiers import by_night

from toolkit.looped import LoopedConfig, parameter_count
from toolkit.looped.checkpoints.families import FAMILIES
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.settings import ARCHITECTURES, settings_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

TRIED = {
    **{
        style: (ARCHITECTURES[style], ATTENTION_SIZES | case.settings)
        for style, case in CASES.items()
    },
    **{name: (made, RECURRENT_SIZES | sizes) for name, (made, sizes) in RECURRENT.items()},
    **{name: (made, MIXTURE_SIZES | sizes) for name, (made, sizes) in MIXTURES.items()},
    **{style: (ARCHITECTURES[style], ATTENTION_SIZES) for style in ("llama", "mistral", "qwen3")},
}
BY_DAY = {"gpt_oss", "mistral", "mixtral", "mamba2", "minimax"}


def read(style, settings):
    """Our configuration, as written with all sizes, and its shapes; None where it is refused."""
    try:
        config = LoopedConfig(**fields_of(FAMILIES[style], settings))
    except ValueError:
        return None
    written = style if style in ARCHITECTURES else f"{style}_text"
    return settings_of(written, config), parameter_count(config)


@pytest.mark.parametrize("name", by_night({*TRIED} - BY_DAY, TRIED))
def test_what_is_absent_has_their_value(name):
    made, sizes = TRIED[name]
    suffixes = [s for s in ("TextConfig", "Config") if hasattr(transformers, made + s)]
    configuration, style = getattr(transformers, made + suffixes[0]), name.split()[0]

    def said(settings):
        return json.loads(configuration(**settings).to_json_string())

    whole, compared = said(sizes), 0
    for absent in whole:
        less = {key: value for key, value in whole.items() if key != absent}
        ours = read(style, less)
        if absent in ("model_type", "tie_word_embeddings") or ours is None:
            continue
        try:
            less.pop("time_step_limit", None)  # JSON has no infinity
            theirs = read(style, said(less))
        except Exception:  # their class wants it
            continue
        assert theirs is None or ours[0] == theirs[0] or ours[1] != theirs[1], absent
        compared += 1
    assert compared > 10
