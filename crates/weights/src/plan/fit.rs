//! What to change when a load does not fit, with numbers.

use super::{LoadPlan, is_loaded, is_matrix, render};
use crate::checkpoint::Checkpoint;
use crate::table::Group;

/// Shortest context that is worth proposing.
const SHORTEST_CONTEXT: u64 = 1024;

/// A quantisation that a smaller checkpoint of the model could have: bits of the experts and of the rest.
struct Recipe {
    name: &'static str,
    experts: u64,
    rest: u64,
}

/// From the closest to the original to the smallest. Groups of 64 with two 16-bit numbers each.
const RECIPES: &[Recipe] = &[
    Recipe { name: "an 8-bit MLX quantisation", experts: 8, rest: 8 },
    Recipe { name: "a 6-bit MLX quantisation", experts: 6, rest: 6 },
    Recipe { name: "a 5-bit MLX quantisation", experts: 5, rest: 5 },
    Recipe { name: "a 4-bit MLX quantisation", experts: 4, rest: 4 },
    Recipe { name: "a 3-bit MLX quantisation", experts: 3, rest: 3 },
    Recipe { name: "an MLX quantisation with 2-bit experts and 8-bit rest", experts: 2, rest: 8 },
    Recipe { name: "a 2-bit MLX quantisation", experts: 2, rest: 2 },
];

/// Proposals, the mildest first; none when the plan fits or the machine is unknown.
pub(super) fn advice(plan: &LoadPlan, checkpoint: &Checkpoint) -> Vec<String> {
    let Some(machine) = plan.request.machine_bytes.filter(|machine| plan.total_bytes > *machine) else {
        return Vec::new();
    };
    let mut advice = Vec::new();
    let sequences = plan.request.sequences.max(1) as u64;
    let for_states = machine.saturating_sub(plan.weight_bytes + plan.working_bytes);
    if let Some(tokens) = context_that_fits(plan, for_states / sequences)
        && tokens < plan.request.context as u64
    {
        advice.push(format!("--context {tokens} would fit with --parallel {sequences}"));
    }
    let states = for_states / plan.state.bytes(plan.request.context as u64).max(1);
    if states >= 1 && states < sequences {
        advice.push(format!("--parallel {states} would fit with --context {}", plan.request.context));
    }
    if advice.is_empty()
        && sequences > 1
        && let Some(tokens) = context_that_fits(plan, for_states)
    {
        advice.push(format!("--parallel 1 --context {tokens} would fit"));
    }
    advice.extend(fewer_slots(plan, machine));
    advice.push(smaller_checkpoint(plan, checkpoint, machine));
    advice
}

/// Fewer experts in memory, where that would do.
fn fewer_slots(plan: &LoadPlan, machine: u64) -> Option<String> {
    let slots = plan.slots?;
    let over = plan.total_bytes - machine;
    let fewer = (slots.slots as u64).checked_sub(over.div_ceil(slots.slot_bytes.max(1)))?;
    (fewer > 0).then(|| format!("--slots {fewer} would fit"))
}

/// The longest context, a whole number of pages, whose state has at most `bytes`.
fn context_that_fits(plan: &LoadPlan, bytes: u64) -> Option<u64> {
    let pages = bytes.checked_sub(plan.state.fixed_bytes())?.checked_div(plan.state.page_bytes())?;
    let tokens = (pages * plan.state.page_tokens).min(plan.model.max_positions as u64);
    (tokens >= SHORTEST_CONTEXT.min(plan.model.max_positions as u64)).then_some(tokens)
}

/// The mildest quantisation that fits, or what the smallest would need.
fn smaller_checkpoint(plan: &LoadPlan, checkpoint: &Checkpoint, machine: u64) -> String {
    let others = plan.state_bytes + plan.working_bytes;
    let more = if plan.request.on_device {
        "use a device with more memory, or --device cpu"
    } else {
        "use a machine with more memory"
    };
    let smaller = RECIPES.iter().map(|recipe| (recipe, recipe_bytes(recipe, checkpoint)));
    let smaller: Vec<_> = smaller.filter(|(_, bytes)| *bytes < plan.weight_bytes).collect();
    match smaller.iter().find(|(_, bytes)| bytes + others <= machine) {
        Some((recipe, bytes)) => {
            format!(
                "{} of this model has weights of about {} and would fit",
                recipe.name,
                render::bytes(*bytes)
            )
        }
        None => match smaller.last() {
            Some((recipe, bytes)) => format!(
                "even {} of this model needs about {}: {more}",
                recipe.name,
                render::bytes(bytes + others)
            ),
            None => format!("no smaller quantisation is known: {more}"),
        },
    }
}

/// Bytes of the trunk's weights in a recipe. Routers, hyper-connections, pool gates and arrays stay as they are.
fn recipe_bytes(recipe: &Recipe, checkpoint: &Checkpoint) -> u64 {
    let mut bytes = 0;
    for (spec, members) in checkpoint.table.specs.iter().zip(&checkpoint.stored) {
        if members.is_empty() || !is_loaded(spec.group) {
            continue;
        }
        let values = spec.shape.values() as u64;
        let is_kept = matches!(spec.group, Group::Router | Group::HyperConnections)
            || !is_matrix(spec)
            || spec.name.ends_with("index_kpool_compress_gate");
        let bits = if spec.group == Group::Experts { recipe.experts } else { recipe.rest };
        bytes += if is_kept { values * 2 } else { values * bits / 8 + values / 64 * 4 };
    }
    bytes
}
