//! The random tiny models give MLX's fp32 results: both MLX layouts, fused and unfused, uniform and mixed widths.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::goldens::Goldens;
use flint_contracts::{Tiny, model, nano};
use flint_cpu::Arithmetic;

fn goldens(tiny: Tiny) -> Goldens {
    Goldens::open(&tiny.folder().join("goldens.safetensors"))
}

#[test]
fn the_fused_4_bit_model_gives_mlx_logits_and_greedy_tokens() {
    let mut model = model(Tiny::Mlx4, Arithmetic::Lanes);
    nano::check_text(&mut model, &goldens(Tiny::Mlx4), "f32.");
    nano::check_streams(&mut model, &goldens(Tiny::Mlx4), "f32.");
}

#[test]
fn the_mixed_width_model_gives_mlx_logits_and_greedy_tokens() {
    let mut model = model(Tiny::MixedWidths, Arithmetic::Lanes);
    nano::check_text(&mut model, &goldens(Tiny::MixedWidths), "f32.");
    nano::check_streams(&mut model, &goldens(Tiny::MixedWidths), "f32.");
}
