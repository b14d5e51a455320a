//! The conformance suite: what every backend must hold, as library code.
//!
//! Each operation of the table in [`ops`](crate::ops) names its check here; the table does not compile without one.
//! * **Row** (`rows.rs`): a row alone and among 2 to 129 others, at every place, next to plain and hostile neighbours,
//!   in dense and strided memory, has the same bits, and nothing outside the output rows changes.
//! * **Seam** (`seam.rs`): any cut of a token run into forwards, with drafts accepted, rejected or never looked at, and
//!   with other sequences in the batch, gives the rows and the state of one token at a time.
//! * **Bound** (`exact.rs`): results lie within a float64 bound that a slightly wrong operation exceeds.
//! * `cheaters.rs` holds backends that break one law each; [`uncaught_cheaters`] lists those that slip through.
//!
//! A backend gets all of it by [`law_tests!`](crate::law_tests).

pub(crate) mod attention;
mod cheaters;
mod encoding;
mod exact;
pub(crate) mod feed;
pub(crate) mod norms;
pub(crate) mod products;
pub(crate) mod recurrent;
mod rows;
pub(crate) mod sampling;
mod seam;
mod seed;
pub(crate) mod streams;

use std::fmt;

use self::rows::RowWords;
use crate::{Backend, Result};

pub use self::cheaters::uncaught_cheaters;

/// Violations that are kept of one case; the rest only repeats them.
const KEPT: usize = 3;

/// Which law a violation breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Law {
    /// A row's bits depend on its neighbours, its place or the number of rows.
    Row,
    /// Outputs or state depend on how a run was cut or on drafts that were not accepted.
    Seam,
    /// A result is outside its float64 bound.
    Bound,
    /// A bound let a wrong result pass: it shows nothing.
    Mutation,
    /// Memory outside the output rows changed.
    Outside,
    /// The operation was refused or failed.
    Failed,
}

/// One broken law.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The operation.
    pub op: &'static str,
    /// The law.
    pub law: Law,
    /// Shape and encoding.
    pub case: String,
    /// Rows of the launch.
    pub rows: usize,
    /// The row.
    pub row: usize,
    /// The column.
    pub column: usize,
    /// What was expected and what was found, in words.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, law, case, rows, row, column, what } = self;
        write!(f, "{op} [{case}] breaks {law:?}: row {row} of {rows}, column {column}: {what}")
    }
}

/// The outputs of one case, for comparison with those of another backend that promises the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transcript {
    /// The operation.
    pub op: &'static str,
    /// Shape and encoding.
    pub case: String,
    /// The bits of all outputs; every NaN as one value.
    pub words: Vec<u32>,
}

/// How an operation is checked.
pub(crate) type Check<B> = fn(&mut B, &mut Session) -> Result<()>;

/// What the suite found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Broken laws.
    pub violations: Vec<Violation>,
    /// The outputs of every operation on fixed inputs.
    pub transcripts: Vec<Transcript>,
}

/// Checks every operation of a backend.
pub fn check_all<B: Backend>(make: impl Fn() -> B) -> Report {
    run(&make, Session::default(), |_| true)
}

/// Checks one operation, by its name in the table.
pub fn check<B: Backend>(make: impl Fn() -> B, op: &str) -> Report {
    run(&make, Session::default(), |name| name == op)
}

/// The same in few launches: every shape and encoding, but one batch of each of few sizes, and one schedule. For tools
/// under which a launch takes long, as a device's memory checker.
pub fn check_few<B: Backend>(make: impl Fn() -> B, op: &str) -> Report {
    run(&make, Session { few: true, ..Session::default() }, |name| name == op)
}

fn run<B: Backend>(make: &impl Fn() -> B, mut session: Session, wanted: impl Fn(&str) -> bool) -> Report {
    for (op, check) in crate::ops::checks::<B>() {
        if wanted(op) {
            session.begin(op);
            if let Err(error) = check(&mut make(), &mut session) {
                session.violation(Law::Failed, 0, 0, 0, error.to_string());
            }
        }
    }
    session.report
}

impl Report {
    /// The violations, one a line; `None` when there are none.
    pub fn complaint(&self) -> Option<String> {
        let lines: Vec<String> = self.violations.iter().map(ToString::to_string).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// A digest (FNV-1a of 64 bits) of each operation's outputs, for comparison with another machine's.
    pub fn digests(&self) -> Vec<(&'static str, u64)> {
        let mut digests: Vec<(&'static str, u64)> = Vec::new();
        for transcript in &self.transcripts {
            if digests.last().is_none_or(|(op, _)| *op != transcript.op) {
                digests.push((transcript.op, 0xCBF2_9CE4_8422_2325));
            }
            if let Some((_, digest)) = digests.last_mut() {
                for byte in transcript.words.iter().flat_map(|word| word.to_le_bytes()) {
                    *digest = (*digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
                }
            }
        }
        digests
    }

    /// The first difference from the outputs of a backend that promises the same bits.
    pub fn difference(&self, other: &Self) -> Option<String> {
        for (a, b) in self.transcripts.iter().zip(&other.transcripts) {
            if a != b {
                let place = a.words.iter().zip(&b.words).position(|(a, b)| a != b);
                return Some(format!(
                    "{} [{}] differs at value {place:?} of {}",
                    a.op,
                    a.case,
                    a.words.len()
                ));
            }
        }
        let (a, b) = (self.transcripts.len(), other.transcripts.len());
        (a != b).then(|| format!("{a} and {b} cases"))
    }
}

/// What was found so far.
#[derive(Debug, Default)]
pub(crate) struct Session {
    op: &'static str,
    case: String,
    /// Violations of the case at hand.
    of_case: usize,
    /// Whether launches are dear.
    few: bool,
    report: Report,
}

impl Session {
    fn begin(&mut self, op: &'static str) {
        self.op = op;
        self.case(String::new());
    }

    /// Starts a case.
    fn case(&mut self, label: String) {
        self.case = label;
        self.of_case = 0;
    }

    fn violation(&mut self, law: Law, rows: usize, row: usize, column: usize, what: String) {
        self.of_case += 1;
        if self.of_case <= KEPT {
            let case = self.case.clone();
            self.report.violations.push(Violation { op: self.op, law, case, rows, row, column, what });
        }
    }

    /// Keeps outputs for the transcript.
    fn record(&mut self, outputs: &[RowWords]) {
        let words = outputs.iter().flatten().flatten().map(|&word| plain_nan(word)).collect();
        self.report.transcripts.push(Transcript { op: self.op, case: self.case.clone(), words });
    }

    /// Compares a row's outputs by bits.
    fn compare(&mut self, law: Law, rows: usize, row: usize, expected: &RowWords, found: &RowWords) {
        for (expected, found) in expected.iter().zip(found) {
            let differs = |(_, (a, b)): &(usize, (&u32, &u32))| plain_nan(**a) != plain_nan(**b);
            let pairs = || expected.iter().zip(found).enumerate();
            if let Some((column, (&a, &b))) = pairs().find(differs) {
                let count = pairs().filter(differs).count();
                let what = format!(
                    "{a:#010x} ({:e}) alone, {b:#010x} ({:e}) here; {count} of {} values differ",
                    f32::from_bits(a),
                    f32::from_bits(b),
                    expected.len()
                );
                self.violation(law, rows, row, column, what);
                return;
            }
        }
    }

    fn inexact(&mut self, difference: &exact::Difference) {
        let &exact::Difference { row, column, exact, word } = difference;
        let what = format!("{:e} ({word:#010x}) where {exact:?} is true", f32::from_bits(word));
        self.violation(Law::Bound, 1, row, column, what);
    }

    fn toothless(&mut self, what: &str) {
        self.violation(
            Law::Mutation,
            1,
            0,
            0,
            format!("{what} is inside the bound, which therefore shows nothing"),
        );
    }

    fn outside(&mut self, rows: usize, index: usize, before: u32, after: u32) {
        let what = format!(
            "element {index} of a buffer, outside the output rows: {before:#010x} became {after:#010x}"
        );
        self.violation(Law::Outside, rows, 0, 0, what);
    }
}

/// Instruction sets make different NaNs; for bits they are one.
fn plain_nan(word: u32) -> u32 {
    if f32::from_bits(word).is_nan() && word != u32::MAX { f32::NAN.to_bits() } else { word }
}

/// The tests of a backend: `law_tests!(module, make)`, where `make()` is a new backend.
#[macro_export]
macro_rules! law_tests {
    ($module:ident, $make:expr) => {
        mod $module {
            use super::*;

            #[test]
            fn every_operation_keeps_the_laws() {
                assert_eq!($crate::law::check_all($make).complaint(), None);
            }

            #[test]
            fn a_queue_that_runs_at_the_next_wait_keeps_the_laws() {
                let report = $crate::law::check_all(|| $crate::wrap::Recorder::new($make()));
                assert_eq!(report.complaint(), None);
            }

            #[test]
            fn every_cheater_is_caught() {
                assert_eq!($crate::law::uncaught_cheaters($make), Vec::<&str>::new());
            }
        }
    };
}
