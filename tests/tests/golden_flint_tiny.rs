//! The embedded model says what the reference says: greedy text of every golden prompt, logits where they are firm.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)] // a contract that cannot run has failed

use flint_contracts::feeding::{append, append_cut, best, whole};
use flint_contracts::goldens::{Goldens, assert_close, floats};
use flint_contracts::{Tiny, arithmetics, model, root};
use flint_cpu::Arithmetic;
use flint_model::LanguageModel;

/// Two correct programs differ by at most 6e-5 in fp32 here.
const LOGITS: f32 = 1e-3;

fn check(arithmetic: Arithmetic) {
    let folder = root().join("tests/fixtures/flint_tiny");
    let goldens = Goldens::open(&folder.join("flint_tiny_mlx.safetensors"));
    let text = std::fs::read_to_string(folder.join("flint_tiny_mlx.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut model = model(Tiny::Trained, arithmetic);
    for prompt in json["prompts"].as_array().unwrap() {
        let id = prompt["id"].as_str().unwrap();
        let ids = goldens.tokens(&format!("{id}.prompt_ids"));
        let expected = goldens.tokens(&format!("{id}.greedy.tokens"));
        let sequence = model.open().unwrap();
        let cuts = whole(&model, ids.len());
        let mut rows = append_cut(&mut model, sequence, &ids, &cuts);
        let mut found = vec![best(&rows[ids.len() - 1])];
        while found.len() < expected.len() {
            rows.extend(append(&mut model, sequence, &[found[found.len() - 1]]));
            found.push(best(&rows[rows.len() - 1]));
        }
        model.close(sequence).unwrap();
        assert_eq!(found, expected, "{id} {arithmetic:?}: greedy tokens");
        if arithmetic == Arithmetic::Lanes && prompt["logits_firm"].as_bool().unwrap() {
            let positions = goldens.tokens(&format!("{id}.logits.positions"));
            let kept: Vec<f32> = positions.iter().flat_map(|p| floats(&rows[*p as usize])).collect();
            assert_close(id, &kept, &goldens.floats(&format!("{id}.logits")), LOGITS);
        }
    }
}

#[test]
fn greedy_text_of_every_golden_prompt_is_the_references_in_every_arithmetic() {
    arithmetics().into_iter().for_each(check);
}
