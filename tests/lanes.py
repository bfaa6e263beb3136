"""Which tests are left out of `make test-fast`, and why: they start processes, or take seconds of core time.

Chosen by measurement (`pytest --durations=0`). A test that starts a process and is not listed fails in the fast lane;
one that became slow makes the fast lane slow, which is how it is noticed.
"""

from __future__ import annotations

PROCESS = {
    "bench/test_path.py",
    "assets/test_asset_store.py::test_killed_writers_leave_whole_images_or_none",
    "assets/test_asset_store.py::test_the_store_works_the_same_on_s3",
    "assets/test_blobs.py::test_s3_conforms",
    "bench/test_plane_benches.py",
    "bench/test_plane_work.py",
    "demo/test_demo.py",
    "demo/test_memory.py",
    "demo/test_refusals.py",
    "demo/test_train_command.py",
    "serve/test_allocation.py",
    "serve/test_faults.py",
    "serve/test_full_volume.py",
    "serve/test_http.py",
    "serve/test_http_page.py",
    "serve/test_kill_points.py",
    "serve/test_metrics.py",
    "serve/test_network.py",
    "serve/test_plane_fork.py",
    "serve/test_process.py",
    "serve/test_processes.py",
    "serve/test_watchdog.py",
    "test_cli.py",
    "test_command_errors.py",
    "test_commands_plane.py",
    "test_docs.py",
    "test_extras.py",
    "test_package.py",
    "test_security.py",
    "test_state_diagram.py",
    "train/test_ranks.py",
    "train/test_trainer_kit_ranks.py",
    "encode/test_codings.py::test_the_same_samples_give_the_same_bytes_in_every_process_and_hash_seed",
    "view/test_browser.py",
    "view/test_columns.py::test_a_column_added_in_one_line_travels_all_the_way",
    "view/test_export_torture.py",
    "view/test_server.py::test_reading_and_showing_need_no_torch",
    "view/test_server.py::test_view_command_serves_until_it_is_interrupted",
}
"""Modules, or single tests as MODULE::TEST, that start processes."""
DEEP = {
    "demo/test_tasks.py::test_trainer_logprobs_equal_sampler_logprobs_at_the_same_weights",
    "encode/test_hostile.py",
    "encode/test_work_bounds.py",
    "hold/test_checkpoint.py::test_taking_a_checkpoint_does_not_disturb_the_table",
    "hold/test_model.py",
    "hold/test_selectors.py::test_built_in_selectors_conform",
    "hold/test_selectors.py::test_prioritized_remover_keeps_the_valuable",
    "hold/test_statistics.py",
    "pack/test_pack_rivals.py::test_the_picture_of_the_docs_can_be_drawn",
    "send/test_simulation.py",
    "serve/test_engine_restarts.py::test_a_restart_changes_no_byte_of_what_follows",
    "serve/test_engine_restarts.py::test_any_retained_step_is_served_again_to_the_byte",
    "serve/test_model_run.py",
    "serve/test_plane.py::test_a_bad_line_loses_nothing_and_gives_no_wrong_byte",
    "serve/test_snapshot.py::test_a_restart_from_memory_equals_one_from_the_whole_log",
    "test_fuzz.py",
    "train/test_attention.py",
    "train/test_image_parity.py",
    "train/test_loss.py::test_every_loss_equals_the_plain_reference_with_its_masks",
    "train/test_loss_logits.py::test_gradients_of_both_results_are_exact",
    "train/test_trainer.py",
}
"""Modules and tests that take long in one process: simulations, searches, statistics, models."""
