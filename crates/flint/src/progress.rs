//! Bars of bytes on standard error, for people only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::terminal::Terminal;

/// A bar that says what is done to what; hidden where nobody looks.
pub(crate) fn bytes_bar(doing: String, terminal: Terminal) -> ProgressBar {
    if !terminal.person_reads_notes {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let template = "{msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.with_message(doing)
}

/// Moves a bar.
pub(crate) fn show(bar: &ProgressBar, done: u64, all: u64) {
    if bar.length() != Some(all) {
        bar.set_length(all);
    }
    bar.set_position(done);
}
