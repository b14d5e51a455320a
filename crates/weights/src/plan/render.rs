//! The plan as a table for a terminal.

use std::fmt::Write;

use super::{GroupPlan, LoadPlan, StatePlan};
use crate::table::Group;

/// Bytes in the unit that keeps three to five digits.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// A number of weights in the unit that people use.
fn weights(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.1} K", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", value / 1e6),
        _ => format!("{:.2} G", value / 1e9),
    }
}

/// A whole number with a comma between thousands.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn label(group: Group) -> &'static str {
    match group {
        Group::Embedding => "embedding",
        Group::Kda => "KDA attention",
        Group::Dsa => "DSA attention",
        Group::Indexer => "DSA indexer",
        Group::Dense => "dense feed-forward",
        Group::Experts => "routed experts",
        Group::Shared => "shared experts",
        Group::Router => "routers",
        Group::HyperConnections => "hyper-connections",
        Group::Norms => "norms",
        Group::Head => "head",
        Group::MtpExperts => "MTP experts",
        Group::Mtp => "MTP, the rest",
        Group::Vision => "vision tower",
    }
}

/// Columns of a table, the first to the left, the others to the right, with two spaces between.
struct Columns {
    rows: Vec<Option<Vec<String>>>,
}

impl Columns {
    fn new(heads: &[&str]) -> Self {
        Self { rows: vec![Some(heads.iter().map(|head| (*head).to_owned()).collect()), None] }
    }

    fn row(&mut self, cells: Vec<String>) {
        self.rows.push(Some(cells));
    }

    /// A rule across the table.
    fn rule(&mut self) {
        self.rows.push(None);
    }

    /// The table, its first column as wide as `width` asks for.
    fn text(&self, width: usize) -> String {
        let rows = || self.rows.iter().flatten();
        let columns = rows().map(Vec::len).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..columns)
            .map(|at| rows().filter_map(|row| Some(row.get(at)?.chars().count())).max().unwrap_or(0))
            .collect();
        let all = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
        if let Some(first) = widths.first_mut() {
            *first += width.saturating_sub(all);
        }
        let total = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
        let mut text = String::new();
        for row in &self.rows {
            match row {
                None => text.push_str(&"─".repeat(total)),
                Some(cells) => {
                    for (at, cell) in cells.iter().enumerate() {
                        let room = widths[at];
                        let _ = if at == 0 {
                            write!(text, "{cell:<room$}")
                        } else {
                            write!(text, "  {cell:>room$}")
                        };
                    }
                }
            }
            while text.ends_with(' ') {
                text.pop();
            }
            text.push('\n');
        }
        text
    }
}

/// The whole plan.
pub(super) fn render(plan: &LoadPlan, width: usize) -> String {
    let width = width.max(80);
    let table = width.min(84);
    let mut text = String::new();
    wrap(&mut text, &plan.source, width, "");
    wrap(&mut text, &headline(plan), width, "");
    text.push('\n');
    text.push_str(&groups(plan).text(table));
    text.push('\n');
    text.push_str(&widths(plan).text(table));
    text.push('\n');
    text.push_str(&state(plan).text(table));
    text.push('\n');
    text.push_str(&totals(plan).text(table));
    text.push('\n');
    wrap(&mut text, &verdict(plan), width, "");
    if let Some(streaming) = streaming(plan) {
        wrap(&mut text, &streaming, width, "");
    }
    for advice in &plan.advice {
        wrap(&mut text, &format!("- {advice}"), width, "  ");
    }
    for warning in &plan.warnings {
        wrap(&mut text, &format!("note: {warning}"), width, "  ");
    }
    text
}

fn headline(plan: &LoadPlan) -> String {
    let model = &plan.model;
    format!(
        "{} parameters, {} active per token; {} layers ({} KDA, {} DSA), {} of {} experts per token; {} tensors, {}",
        weights(model.parameters),
        weights(model.active_parameters),
        model.layers,
        model.kda_layers,
        model.dsa_layers,
        model.experts_per_token,
        model.experts,
        grouped(plan.tensors as u64),
        bytes(plan.tensor_bytes)
    )
}

fn groups(plan: &LoadPlan) -> Columns {
    let mut table = Columns::new(&["part", "matrices", "weights", "stored", "in memory"]);
    let mut sum =
        GroupPlan { group: Group::Norms, matrices: 0, values: 0, stored_bytes: 0, resident_bytes: 0 };
    for group in &plan.groups {
        let resident =
            if group.resident_bytes == 0 { "not loaded".to_owned() } else { bytes(group.resident_bytes) };
        table.row(group_row(label(group.group), group, resident));
        sum.matrices += group.matrices;
        sum.values += group.values;
        sum.stored_bytes += group.stored_bytes;
        sum.resident_bytes += group.resident_bytes;
    }
    table.rule();
    table.row(group_row("all", &sum, bytes(sum.resident_bytes)));
    table
}

fn group_row(label: &str, group: &GroupPlan, resident: String) -> Vec<String> {
    let matrices = grouped(group.matrices as u64);
    vec![label.to_owned(), matrices, weights(group.values), bytes(group.stored_bytes), resident]
}

fn widths(plan: &LoadPlan) -> Columns {
    let mut table = Columns::new(&["matrices stored as", "matrices", "weights", "bits each", "stored"]);
    for width in &plan.widths {
        table.row(vec![
            width.encoding.to_string(),
            grouped(width.matrices as u64),
            weights(width.values),
            format!("{:.2}", width.bits_per_weight),
            bytes(width.bytes),
        ]);
    }
    table
}

fn state(plan: &LoadPlan) -> Columns {
    let StatePlan { kda_state, kda_window, kda_log, dsa_ring, .. } = plan.state;
    let per_token = plan.state.latents_per_token as f64;
    let pooled = plan.state.bytes_per_token() - per_token;
    let mut table = Columns::new(&["state of a sequence", "fixed", "per token"]);
    let mut fixed = |label: &str, count: u64| {
        if count > 0 {
            table.row(vec![label.to_owned(), bytes(count), String::new()]);
        }
    };
    fixed("KDA matrices", kda_state);
    fixed("KDA convolution windows", kda_window);
    fixed("KDA logs of drafts", kda_log);
    fixed("DSA open pools", dsa_ring);
    for (label, count) in [("DSA latents", per_token), ("DSA pooled keys", pooled)] {
        if count > 0.0 {
            table.row(vec![label.to_owned(), String::new(), tokens_bytes(count)]);
        }
    }
    table.rule();
    let all = tokens_bytes(plan.state.bytes_per_token());
    table.row(vec!["all".to_owned(), bytes(plan.state.fixed_bytes()), all]);
    table
}

/// Bytes of a token, which may be a fraction.
fn tokens_bytes(count: f64) -> String {
    bytes(count.ceil() as u64)
}

fn totals(plan: &LoadPlan) -> Columns {
    let request = &plan.request;
    let mut table = Columns::new(&["memory", ""]);
    let plural = if request.sequences == 1 { "sequence" } else { "sequences" };
    let states = format!(
        "state of {} {plural} of {} tokens",
        grouped(request.sequences as u64),
        grouped(request.context as u64)
    );
    for (label, count) in [
        ("weights".to_owned(), plan.weight_bytes),
        (states, plan.state_bytes),
        ("working memory (estimate)".to_owned(), plan.working_bytes),
    ] {
        table.row(vec![label, bytes(count)]);
    }
    table.rule();
    table.row(vec!["all".to_owned(), bytes(plan.total_bytes)]);
    if let Some(machine) = request.machine_bytes {
        table.row(vec![format!("{} can give", request.holder()), bytes(machine)]);
    }
    table
}

/// What streaming means, where experts stream.
fn streaming(plan: &LoadPlan) -> Option<String> {
    let slots = plan.slots.as_ref()?;
    Some(format!(
        "{} of {} experts of each layer are in memory; the others are read from the files when a token needs them, \
         {} a layer at most. The text is the same, the speed is the disk's.",
        slots.slots,
        slots.experts,
        bytes(
            plan.model.experts_per_token as u64 * slots.slot_bytes / plan.model.sparse_layers.max(1) as u64
        )
    ))
}

fn verdict(plan: &LoadPlan) -> String {
    let reads = format!("a decoded token reads {} of weights", bytes(plan.weight_bytes_per_token));
    match plan.request.machine_bytes {
        None => format!("This machine's memory is unknown; {reads}."),
        Some(machine) => match machine.checked_sub(plan.total_bytes) {
            Some(spare) => format!("It fits, with {} to spare; {reads}.", bytes(spare)),
            None => {
                format!("It does not fit: {} are missing. What would:", bytes(plan.total_bytes - machine))
            }
        },
    }
}

/// Adds `line`, broken between words to `width` columns; lines after the first start with `indent`.
fn wrap(text: &mut String, line: &str, width: usize, indent: &str) {
    let mut column = 0;
    for word in line.split(' ') {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            text.push('\n');
            text.push_str(indent);
            column = indent.len();
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
}
