"""Sparse decoding looked into: the drawn data, the retrieval model, the audit of any model."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from tiers import by_night

from toolkit.attention.sparse import SELECTORS, FixedTokens, MassTarget, build, decode_step
from toolkit.attention.sparse.decode.tactic import Tactic
from toolkit.experiments.kit.results import Results
from toolkit.experiments.sparse import audit as audits
from toolkit.experiments.sparse import groups, lossless, model, questions, text_model, texts
from toolkit.experiments.sparse.calibration import reached
from toolkit.experiments.sparse.claims import CLAIMS, TEXT_SEEDS, text_label
from toolkit.experiments.sparse.data import SINK_MASS, gaussian, heavy_tailed
from toolkit.experiments.sparse.experiment import EXPERIMENT
from toolkit.experiments.sparse.lossless import Lossless, decode_losslessly, lossless_table
from toolkit.experiments.sparse.page import write_page
from toolkit.experiments.sparse.quality import at_small_budgets, of_drawn, read_sparsely
from toolkit.experiments.tasks import Retrieval
from toolkit.looped import LoopedConfig, LoopedLM

SMALL = {"heads": 2, "tokens": 512, "queries": 8, "size": 32}


def shares(drawn):
    x = np.einsum("qhd,hsd->qhs", drawn.q, drawn.k) * drawn.q.shape[2] ** -0.5
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def tokens_for(mass, p):
    return (np.sort(p, axis=-1)[..., ::-1].cumsum(axis=-1) < mass).sum(axis=-1) + 1


def test_heavy_tails_are_sparse_and_normal_numbers_are_not():
    heavy, flat = (shares(draw(0)) for draw in (heavy_tailed, gaussian))
    assert heavy[..., :4].sum(axis=-1).mean() == pytest.approx(SINK_MASS, abs=0.02)
    assert tokens_for(0.9, heavy).mean() < 0.15 * 4096
    assert tokens_for(0.9, flat).mean() > 0.5 * 4096


def test_needles_stand_where_they_should():
    task = Retrieval(pairs=3, length=40, queries=2, depth=0.5)
    drawn = jax.device_get(task.draw(jax.random.key(0), 8))
    asked = drawn.tokens[:, task.haystack :: 2]
    for row in range(8):
        places = [int(np.flatnonzero(drawn.tokens[row, : task.haystack] == key)[0])
                  for key in asked[row]]  # fmt: skip
        assert places[0] == 2 * round(0.5 * (task.haystack // 2 - 1))
        answers = drawn.tokens[row, np.array(places) + 1]
        assert (answers == drawn.targets[row, task.haystack :: 2]).all()
    with pytest.raises(ValueError, match="wanted an even number of at least 10"):
        Retrieval(pairs=3, length=8, queries=2)
    with pytest.raises(ValueError, match="1 <= queries <= pairs"):
        Retrieval(pairs=3, length=40, queries=4)


def test_the_recorded_model_finds_needles_in_texts_longer_than_its_own():
    for group, file in model.FILES.items():
        assert file.stat().st_size < 2**20
        params, task = model.load(file), Retrieval(16, 256, 16)
        q, k, _ = model.forward(params, jax.numpy.zeros((1, 2), int))[1][0]
        assert q.shape[2] == group * k.shape[2]
        assert model.accuracy(params, task, 0, batch=8) > 0.95


def test_the_oracle_keeps_most_and_all_tokens_are_everything():
    drawn = heavy_tailed(1, **SMALL)
    kept = {name: of_drawn(drawn, SELECTORS[name](), FixedTokens(64))
            for name in ("oracle", "window")}  # fmt: skip
    assert kept["oracle"].mass > kept["window"].mass
    assert kept["oracle"].error < kept["window"].error
    whole = of_drawn(drawn, SELECTORS["oracle"](), FixedTokens(512))
    assert whole.mass == pytest.approx(1, abs=1e-5)
    assert whole.worst_mass == pytest.approx(1, abs=1e-5)
    assert whole.error < 1e-5


@pytest.mark.nightly
def test_finer_indices_keep_more_and_pages_of_normal_keys_are_any_tokens():
    heavy, flat = heavy_tailed(0), gaussian(0)

    def mass(drawn, name, **settings):
        return of_drawn(drawn, SELECTORS[name](**settings), FixedTokens(256)).mass

    fine, coarse = {"parts": 4, "bits": 8}, {"parts": 2, "bits": 6}
    for drawn in (heavy, flat):
        assert mass(drawn, "pqcache", **fine) > mass(drawn, "pqcache", **coarse)
    clusters = [mass(heavy, "tactic", refresh_every=32, cluster_size=size) for size in (16, 32)]
    assert clusters[0] > clusters[1]
    assert mass(heavy, "hata") > mass(heavy, "hata", uses_norms=False)
    assert mass(flat, "quest") == pytest.approx(mass(flat, "random"), abs=0.03)
    assert mass(heavy, "quest") > 2 * mass(heavy, "random")


RANKING = [name for name, kind in SELECTORS.items() if not kind.sees_queries and name != "knorm"]


@pytest.mark.parametrize("name", by_night(set(RANKING) - {"window"}, RANKING))
def test_a_tail_lowers_the_error_on_heavy_tails(name):
    drawn, selector, budget = heavy_tailed(1, **SMALL), at_small_budgets(name), FixedTokens(64)
    plain, corrected = (
        of_drawn(drawn, selector, budget, corrects_tail=is_on) for is_on in (False, True)
    )
    assert corrected.error < plain.error


def test_the_law_that_is_calibrated_is_the_one_that_stops_a_step():
    drawn, tactic = heavy_tailed(1, **SMALL), replace(at_small_budgets("tactic"), stops_by="fit")
    assert isinstance(tactic, Tactic)
    step = of_drawn(drawn, tactic, MassTarget(0.75, 512))
    found = reached(drawn, tactic, "a / x + b", 0.75)
    assert found.tokens == pytest.approx(step.tokens, abs=0.5)
    assert found.mass == pytest.approx(step.mass, abs=1e-3)


@pytest.mark.slow
def test_with_room_for_all_bytes_a_perplexity_is_that_of_the_model():
    text = texts.passages(0, depth=0.5)[:, -256:]
    own, copied = texts.load_text_model(4), texts.load_text_model(1)
    found, _ = texts.perplexity(own, SELECTORS["window"](), None, text)
    logits, same = (nnx.jit(lambda model, text: model(text))(m, text) for m in (own, copied))
    np.testing.assert_allclose(same, logits, atol=1e-4)  # with key heads copied for each query head
    log_p = jax.nn.log_softmax(logits[:, -texts.STEPS - 1 : -1])
    taken = np.take_along_axis(np.asarray(log_p), text[:, -texts.STEPS :, None], axis=2)
    assert found == pytest.approx(np.exp(-taken.mean()), rel=1e-5)


@pytest.mark.slow
def test_quest_reads_text_no_better_than_the_paper_s_selection_per_head_does():
    """Which keeps little of what the best pages would: their bounds are loose, not ours wrong."""
    language, seen = texts.load_text_model(4), []

    def attend(layer):
        seen.append(layer)
        return read_sparsely(layer, SELECTORS["window"](), 1000, FixedTokens(64))

    text = jax.numpy.asarray(texts.passages(100)[:, :1024])
    layers = {i: audits._Sparse(language.blocks[i].mixer, attend) for i in (1, 2)}
    audits.run_blocks(audits.with_mixers(language, layers).blocks, language.embedding(text))
    (all_q, all_k), page, tokens = (np.asarray(x[0]) for x in seen[0][:2]), 16, 128
    quest, kept = SELECTORS["quest"](sinks=0, recent=1), []
    for length in range(512, 1025, 64):
        q, k = all_q[length - 1] * all_q.shape[2] ** -0.5, all_k[:length]
        keys = k.repeat(len(q) // k.shape[1], axis=1)
        x = np.einsum("hd,shd->hs", q, keys)
        p = np.exp(x - x.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True)).reshape(len(q), -1, page).sum(axis=2)
        pages = keys.reshape(-1, page, *keys.shape[1:])
        bounds = np.maximum(q * pages.max(axis=1), q * pages.min(axis=1)).sum(axis=2).T
        bounds[:, -1] = np.inf  # the page of the newest token
        found = []
        for order in (bounds, p):
            best = np.argsort(-order, axis=1)[:, : tokens // page]
            found.append(np.take_along_axis(p, best, axis=1).sum(axis=1).mean())
        rows = np.zeros((1, k.shape[1], 1024, k.shape[2]), np.float32)
        rows[0, :, :length] = k.swapaxes(0, 1)
        cache = build(quest, rows, rows, jax.numpy.array([length]))
        # Heads share the newest page, which is read once.
        budget = FixedTokens(len(q) // k.shape[1] * (tokens - page) + page)
        step = decode_step(cache, q[None], quest, budget, scale=1.0, group="each")
        ours = np.exp(np.asarray(step.lse[0]) - np.logaddexp.reduce(x, axis=1)).mean()
        kept.append([ours, *found])
    ours, paper, best = np.mean(kept, axis=0)
    assert ours == pytest.approx(paper, abs=1e-4)
    assert best > 1.5 * paper


def test_quotations_repeat_what_stood_at_a_depth():
    text, size = texts.passages(0, depth=0.25), texts.CUE + texts.STEPS
    start = round(0.25 * (texts.LENGTH - 2 * size))
    np.testing.assert_array_equal(text[:, -size:], text[:, start : start + size])
    assert (texts.passages(0)[:, -size:] != text[:, -size:]).any(axis=1).all()
    rows = jax.numpy.arange(2 * 256).reshape(2, 256)  # no number twice
    quoted = text_model.quoting(jax.random.key(0), rows, 1)
    for row, quote in zip(np.asarray(rows), np.asarray(quoted), strict=True):
        (changed,) = np.nonzero(row != quote)
        assert len(changed) == text_model.QUOTE
        assert quote[changed[0]] < row[changed[0]] - text_model.QUOTE + 1
        assert (np.diff(quote[changed]) == 1).all()


@pytest.mark.parametrize("group", [4, 8])
def test_a_text_model_begins_as_one_that_continues_what_stood_before(group):
    """Random letters that no text has: without training, and twice as well where they repeat."""
    model = text_model.initial(0, group)
    assert model.blocks[1].mixer.key.kernel.shape[1] == 8 // group * text_model.PART
    letters = np.random.default_rng(0).integers(97, 123, (2, 128))
    letters[:, -32:] = letters[:, 20:52]
    log_p = jax.nn.log_softmax(nnx.jit(lambda model, text: model(text))(model, letters))
    loss = -np.take_along_axis(np.asarray(log_p[:, :-1]), letters[:, 1:, None], axis=2)[..., 0]
    assert loss[:, -24:].mean() < 0.5 * loss[:, 60:96].mean()


@pytest.mark.slow
def test_at_equal_bytes_a_system_reads_no_more_than_chance_and_its_index_counts():
    drawn, most = heavy_tailed(0, group=4, queries=2), groups.DRAWN_TOKENS
    for name in ("random", "hata", "quest"):
        budget = groups.drawn_budget(name, 4)
        found = of_drawn(drawn, at_small_budgets(name), budget)
        kilobytes = most * 2 * 128 * 4 / 1000
        assert 0.95 * kilobytes < found.kilobytes <= kilobytes
        assert (found.tokens == most) == (name == "random")


def test_query_heads_of_a_group_ask_for_themselves_and_the_first_group_is_the_old_law():
    alone, four = (heavy_tailed(1, group=group, **SMALL) for group in (1, 4))
    assert four.q.shape == (8, 8, 32)
    np.testing.assert_array_equal(alone.k[:, 4:], heavy_tailed(1, **SMALL).k[:, 4:])
    p = shares(alone._replace(k=four.k.repeat(4, axis=0), q=four.q))
    best = p[..., 4:].argmax(axis=-1).reshape(8, 2, 4)
    assert np.mean([len(set(row)) for row in best.reshape(-1, 4)]) > 2


def test_an_experiment_in_which_chance_does_not_lose_is_void():
    claim = next(c for c in CLAIMS if c.text.startswith("4 query heads per key head: the bytes of"))
    noise, name = np.random.default_rng(0).normal(size=TEXT_SEEDS) / 1000, groups.text(4)
    for chance, word in ((1.005, "void"), (1.2, "seen")):
        ratio = {"dense": 1.0, "oracle": 1.001, "random": chance}
        outcomes = {
            text_label(system): {seed: {name: 4 * r + x} for seed, x in enumerate(noise)}
            for system, r in ratio.items()
        }
        assert claim.verdict(Results(outcomes)).word == word


def test_a_part_of_the_settings_is_drawn():
    """None of the systems by themselves, as `--only "equal bytes"` runs into a fresh folder."""
    outcomes = {"quest, equal bytes": {0: {"accuracy, 256 tokens": 0.5, "mass, 256 tokens": 0.75}}}
    left, right = EXPERIMENT.draw(Results(outcomes), "").axes[:2]
    heights = [bar.get_height() for bar in left.patches]
    assert heights == [0.5, 0.75, 0]  # two numbers, and the legend's
    assert not right.texts


@pytest.mark.slow
def test_an_audit_shows_each_index_at_equal_bytes(monkeypatch):
    """A system with an index reads fewer tokens there, and no more than the budget's bytes."""
    monkeypatch.setattr(audits, "SELECTORS", {n: SELECTORS[n] for n in ("random", "quest", "hata")})
    language = LoopedLM(LoopedConfig.tiny("full", width=16, heads=2), rngs=nnx.Rngs(0))
    budget, size = 44, 8
    first, *_, rows = audits.audit(language, np.arange(75, dtype=np.int32), (24, budget), steps=4)
    assert [row.name for row in first] == ["random"]
    assert "No row at equal bytes" in audits.verdict(first)
    # A budget that one system cannot keep says so of that system, and of no other.
    assert [row.name for row in rows if row.budget == 24] == ["random", "hata"]
    words = "no row, as its sinks and recent tokens, which are always read, are 35"
    assert f"quest, budget 24: {words}" in audits.audit_table(rows)
    rows = [row for row in rows if row.budget == budget]
    found = {row.name: row for row in rows}
    # Hashes of keys this small take more bytes than the keys.
    assert list(found) == ["random", "quest", "quest, equal bytes", "hata"]
    kilobytes = budget * 2 * size * 4 / 1000
    assert found["random"].quality.kilobytes == pytest.approx(kilobytes)
    plain, equal = found["quest"].quality, found["quest, equal bytes"].quality
    assert plain.kilobytes > kilobytes >= equal.kilobytes > 0.9 * kilobytes
    assert plain.tokens > equal.tokens
    table = audits.audit_table(rows)
    assert words not in table
    assert "quest, equal bytes" in table
    assert "hata: not at equal bytes" in table
    # Weights of a random model are flat: chance keeps as much, and the budget decides nothing.
    assert f"Budget {budget} is void" in audits.verdict(rows)
    better = found["quest, equal bytes"]
    better = better._replace(quality=better.quality._replace(mass=0.99))
    told = audits.verdict([*rows[:2], better])
    assert "at equal bytes quest keeps the most mass, 0.990" in told


@pytest.mark.slow
def test_an_audit_tells_what_was_dropped(monkeypatch, tmp_path):
    chosen = {name: SELECTORS[name] for name in ("oracle", "window")}
    monkeypatch.setattr(audits, "SELECTORS", chosen)
    config = LoopedConfig.tiny("full", loops=1, width=16, heads=2)
    language = LoopedLM(config, rngs=nnx.Rngs(0))
    text = "<needle> & hay " * 5
    tokens, pieces = audits.text_reader(language, tmp_path)(text)
    *_, rows = audits.audit(language, tokens, (28,), steps=4)
    assert [row.name for row in rows] == ["oracle", "window"]
    assert all(row.off < 1e-4 for row in rows)
    oracle, window = rows
    assert oracle.quality.mass > window.quality.mass
    assert window.lost[-20:].sum() == 0
    assert window.lost.sum() > oracle.lost.sum() > 0
    assert "window" in audits.audit_table(rows)
    write_page(tmp_path / "page.html", "a < b", rows, pieces)
    page = (tmp_path / "page.html").read_text()
    assert "a &lt; b" in page
    assert "&lt;" in page.split("<summary>window")[1]
    assert page.index("No row at equal bytes") < page.index("<svg") < page.index("<pre>")
    with pytest.raises(ValueError, match="too short"):
        next(audits.audit(language, tokens[:30], (28,), steps=4))
    with pytest.raises(ValueError, match="steps must be at least 1"):
        next(audits.audit(language, tokens, (28,), steps=0))
    with pytest.raises(ValueError, match="budget must be at least 5 tokens, what window always"):
        next(audits.audit(language, tokens, (28, 4), steps=4))
    recurrent = LoopedLM(LoopedConfig.tiny("gdn", width=16, heads=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs softmax layers"):
        next(audits.audit(recurrent, tokens, (28,), steps=4))
    with pytest.raises(ValueError, match=r"budget must be 1 to 74 tokens; got \(75,\)"):
        next(audits.audit(language, tokens, (75,), steps=4))


def test_pieces_of_a_text_are_the_text(tmp_path):
    """Where a character is several tokens, too, as it is to tokenizers of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    letters = tokenizers.trainers.BpeTrainer(initial_alphabet=byte_level.alphabet(), vocab_size=256)
    tokenizer.train_from_iterator([""], letters)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    language = LoopedLM(LoopedConfig.tiny(width=16, heads=2, vocabulary=257), rngs=nnx.Rngs(0))
    tokens, pieces = audits.text_reader(language, tmp_path)("a “word” \n")
    assert len(tokens) == len(pieces) == len("a “word” \n".encode())
    assert "".join(pieces) == "a “word” \n"
    assert pieces[:4] == ["a", " ", "“", ""]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer: "):
        audits.text_reader(language, tmp_path)


def by_words(text):
    """A tokenizer whose tokens are words and what is between them."""
    pieces = re.findall(r"\s*\S+|\s+$", text)
    return np.array([hash(piece) % 1000 for piece in pieces], np.int32), pieces


@pytest.mark.parametrize("kind", questions.QUESTIONS)
def test_prompts_hold_what_the_answer_follows_from_and_end_with_it(kind):
    text, sizes = "One line.\nAnother line.\n", []
    for read, length in ((audits.as_bytes, 700), (by_words, 200)):
        drawn = questions.prompts(kind, read, text, length, 3, seed=1)
        assert drawn.tokens.shape == (3, length)
        asked = [questions.QUESTIONS[kind](np.random.default_rng((1, i)), text) for i in range(3)]
        sizes.append(len(read(asked[0].answer)[0]))
        for row, question, size in zip(drawn.tokens, asked, drawn.answers, strict=True):
            np.testing.assert_array_equal(row[-size:], read(question.answer)[0])
            assert drawn.question >= size + len(read(question.question)[0]) - 1
            before = row[: -len(read(question.question + question.answer)[0])].tobytes()
            for sentence in question.needed:
                assert read(sentence)[0][1:-1].tobytes() in before
    assert sizes[0] > sizes[1]
    with pytest.raises(ValueError, match=f"tokens must be at least .* for '{kind}'; got 5"):
        questions.prompts(kind, audits.as_bytes, text, 5, 1, seed=0)


@pytest.mark.slow
def test_questions_are_answered_by_what_reads_the_right_tokens_and_not_by_chance(monkeypatch):
    """A sharper form of the untrained text model copies what stood before, letter by letter."""
    monkeypatch.setattr(questions, "SELECTORS", {n: SELECTORS[n] for n in ("random", "oracle")})
    copying = text_model.initial(0)
    query, head = copying.blocks[1].mixer.query.kernel, copying.unembedding
    assert head is not None  # not the embedding
    query[...], head[...] = 1.6 * query[...], 4 * head[...]
    how = {"budgets": (30,), "length": 192, "number": 4}
    rows = questions.ask(copying, audits.as_bytes, "Some text.\n", ("needle",), **how)
    found = {row.system: row.accuracy for row in rows}
    assert found["dense"] - found["random"] >= 0.5
    assert found["dense"] - found["oracle"] <= 0.25
    table = questions.answers_table(rows)
    assert "VOID" not in table
    assert "quest, budget 30: no row" in table
    chance = [row._replace(accuracy=found["dense"]) for row in rows]
    assert "needle with 30 tokens is VOID" in questions.answers_table(chance)
    with pytest.raises(ValueError, match=r"questions must be among needle, keys.*; got 'poem'"):
        questions.ask(copying, audits.as_bytes, "", ("poem",), **how)


def test_whether_lossless_decoding_pays_is_said_plainly():
    slow, quick = (Lossless(n, 1.0, 1.5, 4, t, 0.003) for n, t in (("a", 0.004), ("b", 0.002)))
    assert "It does not pay here" in lossless_table([slow], 64)
    assert "It pays with b: 1.50 times" in lossless_table([slow, quick], 64)
    assert "NOT LOSSLESS: identical tokens are b 96.9%" in lossless_table(
        [slow, quick._replace(same=31 / 32)], 64
    )
    chance = slow._replace(name="random")  # the control, at the same budget
    assert "VOID" in lossless_table([quick, chance], 64)
    assert "VOID" not in lossless_table([quick, chance._replace(kept=1.0)], 64)


def test_a_system_that_drafts_nothing_is_named_with_the_reason():
    row = Lossless("quest", 1.0, 1.5, 4, 0.004, 0.003)
    lines = lossless_table([row], 32).splitlines()
    assert next(x for x in lines if x.startswith("quest, ")).endswith("always read, are 35")
    assert not any(x.startswith("hata") for x in lines)  # 20 tokens are enough
    assert next(x for x in lines if x.startswith("snapkv")).endswith("no queries of the prompt")
    assert "infllm, budget 2048: no row" in lossless_table([row], 2048)
    assert "No system drafts" in lossless_table([], 8)


@pytest.mark.slow
def test_lossless_decoding_of_an_audited_model_is_exact(monkeypatch):
    monkeypatch.setattr(lossless, "SELECTORS", {"quest": SELECTORS["quest"]})
    config = LoopedConfig.tiny("full", loops=1, width=16, heads=2)
    language = LoopedLM(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 256, 48, np.int32)
    (row,) = decode_losslessly(language, tokens, budget=40, length=8, drafts=2)
    assert row.same == 1
    assert 0 <= row.kept <= 2
    assert row.seconds > 0 < row.dense_seconds
    with pytest.raises(ValueError, match="at least 1 token"):
        decode_losslessly(language, tokens, budget=24, length=0)
