//! The model's thinking: its markers, and thinking that stands inside an answer's text.

/// Opens the thinking.
pub(crate) const OPEN: &str = "<think>";
/// Ends the thinking; the answer follows.
pub(crate) const CLOSE: &str = "</think>";

/// How a template treats thinking that a client sends back inside an assistant message's content.
///
/// The template finds the markers by their text, which it cannot do once they are inked, so the cut is made before.
/// Families of templates trim the two parts differently; the right rule is the one that gives the plain rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inline {
    /// It is text like any other.
    Keep,
    /// Cut at the markers.
    Cut,
    /// Cut, and line breaks dropped around the thinking and before the answer.
    CutLines,
    /// Cut, and white space dropped around both.
    CutSpace,
}

impl Inline {
    /// The rules to try, in order.
    pub(crate) const RULES: [Self; 4] = [Self::Keep, Self::Cut, Self::CutLines, Self::CutSpace];

    /// Thinking and answer of a text with an end marker; `None` without one or when nothing is cut.
    ///
    /// The thinking is what stands before the first end marker, behind the last start marker there; the answer is what
    /// stands behind the last end marker.
    pub(crate) fn cut(self, text: &str) -> Option<(String, String)> {
        let (before, _) = text.split_once(CLOSE)?;
        let thinking = before.rsplit_once(OPEN).map_or(before, |(_, thinking)| thinking);
        let (_, answer) = text.rsplit_once(CLOSE)?;
        let (thinking, answer) = match self {
            Self::Keep => return None,
            Self::Cut => (thinking, answer),
            Self::CutLines => (thinking.trim_matches('\n'), answer.trim_start_matches('\n')),
            Self::CutSpace => {
                let strip = |text| crate::python::strip(text, None, true, true);
                (strip(thinking), strip(answer))
            }
        };
        Some((thinking.to_owned(), answer.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinking_stands_between_the_last_opening_and_the_first_end() {
        let cut =
            |rule: Inline, text| rule.cut(text).map(|(thinking, answer)| format!("{thinking}|{answer}"));
        assert_eq!(cut(Inline::Cut, "<think>a</think>\n\nb "), Some("a|\n\nb ".into()));
        assert_eq!(cut(Inline::Cut, "x<think>y<think>a</think>m</think>b"), Some("a|b".into()));
        assert_eq!(cut(Inline::Cut, "a</think>b"), Some("a|b".into()));
        assert_eq!(cut(Inline::Cut, "<think>a"), None);
        assert_eq!(cut(Inline::Keep, "<think>a</think>b"), None);
        assert_eq!(cut(Inline::CutLines, "<think>\n a\n</think>\n b\n"), Some(" a| b\n".into()));
        assert_eq!(cut(Inline::CutSpace, "<think>\n a\n</think>\n b\n"), Some("a|b".into()));
    }
}
