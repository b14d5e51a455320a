//! The options about memory: how much Flint may use, and how many experts are in it.

use std::fmt;
use std::str::FromStr;

use flint_weights::plan::ExpertsWanted;
use serde::Deserialize;

/// The option `--slots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct SlotsChoice(pub(crate) ExpertsWanted);

impl FromStr for SlotsChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = match text {
            "auto" => ExpertsWanted::Auto,
            "all" => ExpertsWanted::All,
            number => match number.parse() {
                Ok(slots) if slots > 0 => ExpertsWanted::Slots(slots),
                _ => {
                    return Err(format!("{text:?} is no number of slots; say auto, all, or a number from 1"));
                }
            },
        };
        Ok(Self(wanted))
    }
}

/// The option `--memory`: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct MemorySize(pub(crate) u64);

/// Units by their letter.
const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no size; write a number with M, G or T, as 96G or 1.5T");
        let upper = text.trim().to_ascii_uppercase();
        let short = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        let unit = UNITS.iter().find(|(letter, _)| short.ends_with(*letter));
        let (number, shift) =
            unit.map_or((short, 0), |(letter, shift)| (short.trim_end_matches(*letter), *shift));
        let value: f64 = number.trim().parse().map_err(|_| wrong())?;
        let bytes = value * (1_u64 << shift) as f64;
        if !bytes.is_finite() || bytes < 1.0 || bytes >= (1_u64 << 60) as f64 {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

macro_rules! from_string {
    ($($name:ty),*) => {
        $(impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        })*
    };
}

from_string!(SlotsChoice, MemorySize);

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::terminal::bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1024() {
        for (text, bytes) in
            [("96G", 96 << 30), ("1.5t", 3 << 39), ("512 MiB", 512 << 20), ("64gb", 64 << 30), ("4096", 4096)]
        {
            assert_eq!(text.parse::<MemorySize>().unwrap().0, bytes, "{text}");
        }
        for text in ["", "G", "-1G", "many", "1e40G", "0", "NaN", "1GG G"] {
            let message = text.parse::<MemorySize>().unwrap_err();
            assert!(message.contains("as 96G"), "{message}");
        }
    }

    #[test]
    fn slots_are_auto_all_or_a_number() {
        let wanted = |text: &str| text.parse::<SlotsChoice>().map(|choice| choice.0);
        assert_eq!(wanted("auto"), Ok(ExpertsWanted::Auto));
        assert_eq!(wanted("all"), Ok(ExpertsWanted::All));
        assert_eq!(wanted("96"), Ok(ExpertsWanted::Slots(96)));
        for text in ["0", "-1", "some", "1.5"] {
            assert!(wanted(text).unwrap_err().contains("auto, all"), "{text}");
        }
    }
}
