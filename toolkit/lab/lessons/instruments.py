"""The opening question of each instrument notebook, asked before its panel is shown."""

from toolkit.lab.lessons import instrument_answers as answers
from toolkit.lab.lessons.outline import Outline, Question

OUTLINES = {
    "mixers": Outline(
        "Linear-time mixers",
        (
            Question(
                "same_word",
                "The text holds six “the”. At the last one, which share of all influence do the "
                "five earlier ones have together, with retention, in per cent?",
                answers.same_word,
                unit="per cent",
                low=0,
                high=100,
                seconds=5,
            ),
        ),
    ),
    "looped": Outline(
        "Looped models",
        (
            Question(
                "reach",
                "Two layers with a window of 8 bytes each, the byte itself included, run in four "
                "loops. How many bytes can the last one know of?",
                answers.reach,
                unit="bytes",
                low=1,
                high=10_000,
                seconds=60,
            ),
        ),
    ),
    "planning": Outline(
        "Planning a train step",
        (
            Question(
                "activations",
                "Llama 3 8B with Adam in float32 under ZeRO-3 on eight H100s, one sequence of "
                "4,096 tokens per chip, nothing recomputed: which share of what a chip holds are "
                "the activations kept for the backward pass, in per cent?",
                answers.kept_activations,
                unit="per cent",
                low=0,
                high=100,
            ),
        ),
    ),
    "sharding": Outline(
        "Sharded training",
        (
            Question(
                "share_held",
                "ZeRO-1 on eight devices, Adam: weights and gradients stay whole, the optimiser's "
                "moments are cut in eight. Which share of what one device alone would hold does "
                "each device still hold, in per cent?",
                answers.share_held,
                unit="per cent",
                low=0,
                high=100,
                seconds=4,
            ),
        ),
    ),
    "latent": Outline(
        "Latent attention",
        (
            Question(
                "latents_kept",
                "DeepSeek-V3 keeps 512 latent numbers of every token and a rotary key of 64. Two "
                "chips cut the latents in two slices (tpla). Which share of the whole cache does "
                "each of them keep, in per cent?",
                answers.latents_kept,
                unit="per cent",
                low=0,
                high=100,
                seconds=1,
            ),
        ),
    ),
    "experts": Outline(
        "Experts",
        (
            Question(
                "pairs_dropped",
                "A small model, trained without a loss that evens its loads, sends each of 110 "
                "bytes to two of eight experts in its second layer. With capacity 1 an expert "
                "takes as many pairs as if all loads were even. Which share of the pairs is "
                "dropped, in per cent?",
                answers.pairs_dropped,
                unit="per cent",
                low=0,
                high=100,
                seconds=10,
            ),
        ),
    ),
    "pipelines": Outline(
        "Pipelines",
        (
            Question(
                "one_slow_stage",
                "1F1B on four devices with eight microbatches ends after 33 forwards of one "
                "microbatch, if a backward takes two and messages take no time. Now one stage of "
                "the four, stage 2, takes twice as long for everything. After how many forwards of "
                "the others does it end?",
                answers.one_slow_stage,
                unit="forwards",
                low=0,
                high=1000,
            ),
        ),
    ),
    "collectives": Outline(
        "Collectives",
        (
            Question(
                "slow_cable",
                "Nine ranks form a mesh of 3 x 3 whose cables carry 1 GB/s each way, and gather an "
                "array whose parts they hold. One of the two cables at a corner falls to half its "
                "rate. How much slower is the best schedule then, in per cent of its GB/s?",
                answers.slow_cable,
                unit="per cent",
                low=0,
                high=100,
                seconds=4,
            ),
        ),
    ),
    "gradients": Outline(
        "Gradients",
        (
            Question(
                "few_compressed",
                "Eight H100 on NVLink train a small model on 4,096 tokens each and sum ten "
                "gradients. Eight bits would halve the bytes of bfloat16 and quarter those of "
                "float32. How many of the ten does it pay to compress?",
                answers.few_compressed,
                low=0,
                high=10,
            ),
        ),
    ),
    "serving": Outline(
        "Serving",
        (
            Question(
                "stall",
                "Llama 3 8B on two H100 writes a token per row in 10 ms, and reads every prompt "
                "(about 350 tokens) as soon as it comes, while all rows of that chip stand still. "
                "At 40 requests per second, above how many milliseconds is the largest gap "
                "between two tokens in one text of ten?",
                answers.stall,
                unit="ms",
                low=1,
                high=100_000,
                seconds=1,
            ),
        ),
    ),
    "speedups": Outline(
        "Recorded speed",
        (
            Question(
                "token_scan",
                "The gated delta net in float32 on two cores: one sequence of 2,048 tokens, 8 "
                "heads of 64, forward and backward. One token after the other, how many times as "
                "long does it take as in chunks?",
                answers.token_scan,
                unit="times",
                low=0.01,
                high=1000,
                seconds=1,
            ),
        ),
    ),
    "sparsity": Outline(
        "Sparse attention",
        (
            Question(
                "needles_found",
                "A small model finds all of eight needles in 1,024 tokens of noise. Now every head "
                "reads 64 tokens, in pages of 16 that Quest picks by a bound of their scores. How "
                "many of the eight does the model still find?",
                answers.needles_found,
                unit="needles",
                low=0,
                high=8,
                seconds=28,
            ),
        ),
    ),
    "lr_search": Outline(
        "Searching the learning rate",
        (
            Question(
                "next_rate",
                "AutoLRS has tried six rates. It tries next where mean - 1,000 standard deviations "
                "of its Gaussian process is lowest. Where is that?",
                answers.next_rate,
                options=(
                    "close to the best rate so far",
                    answers.GAP,
                    "at the highest rate allowed",
                ),
            ),
        ),
    ),
}
