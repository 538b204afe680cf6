"""What could be imported before the rooms were made stays importable from where it was."""

import importlib

import pytest

NAMES = {
    "attention": """
        BlockCache IndexedCache KVCache MIXERS Mixer deepseek_sparse_attention
        deepseek_sparse_attention_reference deepseek_sparse_attention_step delta_net
        delta_net_reference delta_net_step gated_delta_net gated_delta_net_reference
        gated_delta_net_step gated_delta_product gated_delta_product_reference
        gated_delta_product_step gated_linear_attention gated_linear_attention_reference
        gated_linear_attention_step hgrn2 hgrn2_reference hgrn2_step indexer_loss
        kimi_delta_attention kimi_delta_attention_reference kimi_delta_attention_step
        linear_attention linear_attention_reference linear_attention_step mamba2
        mamba2_reference mamba2_step mixer native_sparse_attention
        native_sparse_attention_reference native_sparse_attention_step retention
        retention_log_decay retention_reference retention_step rwkv7 rwkv7_reference rwkv7_step
        softmax_attention softmax_attention_reference softmax_attention_step unit_lower_inverse
    """,
    "bench": """
        Case PlannedCase SUITES Suite Yardstick agree run_case run_suite_here run_suites
    """,
    "conversion": """
        Conversion ConversionPlan alignment_losses convert loop_weights restoration_benefits
        student_from top_k_divergence
    """,
    "experiments": """
        Claim Column Comparison EXPERIMENTS Experiment MissingResultError Results Run Stopped
        Verdict Workspace load_comparison load_experiment result_table run_comparison
        run_experiment show_comparison show_recorded
    """,
    "lab": """
        Choice CostPanel LoopPanel LoopStatePanel MemoryPanel MixerCostPanel MixerPanel
        NotebookRun Number Panel RacePanel ReadingPanel SearchPanel TrainedModel TrainingRun
        Words export_language_model load_language_model run_notebook run_tour stream_text
        train_language_model
    """,
    "looped": """
        IndexerLosses LAYERS LoopedCache LoopedConfig LoopedLM PRESETS back_loaded bookend by_loop
        cache_bytes_per_sequence cache_bytes_per_token decode_step draw_loops effective_transition
        exit_loop exit_loss exit_probabilities extend flops_per_token front_loaded generate
        indexer_losses influence_bound interleave load_checkpoint load_layer load_model
        match_compute match_parameters pad_prompts parameter_count penalised_logits
        permutation_steps prefill random_placement sample_token save_model scanned_layers stream
        tokens_reached truncated_logits vote with_loops with_windows
    """,
    "lr": """
        AutoLRS CONTENDERS Contender Controller CoordinateCheck Forecast GaussianProcess Ledger
        LR_RANGE MODES ModelOfWidth NoisyQuadratic ProbeThenDecay Request SearchProgress
        SearchResult Searcher TrainState Transfer ask contender cooldown_schedule coordinate_check
        fit_gaussian_process forecast_loss init last_iterate_bound lowest_confidence_bound
        power_schedule published_forecast refined_schedule search shape_rates tabulated_schedule
        tell transfer transferred_weights warmup_stable_decay_schedule
    """,
    "measure": """
        Collective Hardware Peak ProgramCost Record Timing UncheckedRatioError available_cores
        available_memory collective_table collectives cpu_name environment environment_rows
        hardware in_words interquartile_range matmul_rate memory_bandwidth program_cost
        published_peak read_records record speedup time_contenders write_records
    """,
    "parallel": """
        Layout Placement data_parallel fully_sharded layout make_mesh partitioned_train_step
        sharded_train_step simulate_devices
    """,
    "training": """
        BYTE_VOCABULARY CheckpointError CheckpointWarning Checkpoints Corpus CorpusError
        CorpusFile DivergedError FitOptions FitResult MetricsLog RateSearch TrainState TrainStep
        adamw evaluation_batches fit load_corpus make_evaluation make_train_step read_metrics
        sample_batch search_rate
    """,
}


@pytest.mark.parametrize("room", NAMES)
def test_public_names_are_where_they_were(room):
    module = importlib.import_module(f"toolkit.{room}")
    absent = [name for name in NAMES[room].split() if not hasattr(module, name)]
    assert not absent, absent
