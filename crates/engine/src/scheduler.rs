//! Which rows go into the next forward: a pure function of what runs and what waits.
//!
//! No clock, no model, no I/O: equal views give equal plans, so a round can be logged and replayed. The order of the lists
//! is age, oldest first. The planner knows one number of a request's progress: how many decided tokens its sequence has not
//! seen yet. One is a decode row, more is a prompt being read, and nothing else tells the two apart.
//!
//! The row budget goes, in this order, to
//! 1. one row of every running request that has one pending token: a long prompt never holds up the replies of others;
//! 2. drafts, one each in turn until wishes or rows run out; half of what is left stays free while a prompt waits;
//! 3. prompts, oldest first. Each is offered half of what is left and the last one all, then what nobody took goes to the
//!    oldest that still lacks some: the oldest moves fastest, and a short prompt is not stuck behind a long one.
//!
//! A waiting request is admitted when it gets a row, so no sequence is open without work.

/// What the planner knows of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestView {
    /// Names the request.
    pub request: u64,
    /// Decided tokens that its sequence has not seen, at least 1.
    pub pending: usize,
    /// Drafts that are worth verifying.
    pub drafts: usize,
}

/// Everything a plan depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Requests with an open sequence, oldest first.
    pub running: Vec<RequestView>,
    /// Requests without one, oldest first. More than `places` are not looked at.
    pub waiting: Vec<RequestView>,
    /// Sequences that may be opened.
    pub places: usize,
    /// Rows of the next forward. At least as many as requests run, or the youngest get none.
    pub rows: usize,
}

/// One request's part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSpan {
    /// The request.
    pub request: u64,
    /// Pending tokens that go, at least 1.
    pub sure: usize,
    /// Most drafts that go with them; only where no pending token stays behind.
    pub drafts: usize,
}

/// The next forward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// So many of the waiting requests are admitted, oldest first. Their spans are in the plan.
    pub admitted: usize,
    /// The spans, oldest request first.
    pub spans: Vec<PlannedSpan>,
}

/// Plans the next forward.
pub fn plan(view: &View) -> Plan {
    let newcomers = &view.waiting[..view.waiting.len().min(view.places)];
    let requests: Vec<&RequestView> = view.running.iter().chain(newcomers).collect();
    let mut sure = vec![0; requests.len()];
    let mut drafts = vec![0; requests.len()];
    let mut left = view.rows;

    let (decoding, prompts): (Vec<usize>, Vec<usize>) =
        (0..requests.len()).partition(|&index| index < view.running.len() && requests[index].pending == 1);
    let decoding = &decoding[..decoding.len().min(left)];
    for &index in decoding {
        sure[index] = 1;
        left -= 1;
    }

    let for_prompts = if prompts.is_empty() { 0 } else { left.div_ceil(2) };
    let for_drafts = left - for_prompts;
    left -= share_in_turn(&requests, decoding, for_drafts, &mut drafts);

    for (place, &index) in prompts.iter().enumerate() {
        let offered = if place + 1 == prompts.len() { left } else { left.div_ceil(2) };
        sure[index] = requests[index].pending.min(offered);
        left -= sure[index];
    }
    for &index in &prompts {
        let more = (requests[index].pending - sure[index]).min(left);
        sure[index] += more;
        left -= more;
    }

    let spans: Vec<PlannedSpan> = requests
        .iter()
        .zip(sure.iter().zip(&drafts))
        .filter(|(_, (sure, _))| **sure > 0)
        .map(|(request, (&sure, &drafts))| PlannedSpan { request: request.request, sure, drafts })
        .collect();
    // Offers shrink with age, so those with a row come before those without.
    let admitted = sure[view.running.len()..].iter().filter(|sure| **sure > 0).count();
    Plan { admitted, spans }
}

/// Gives drafts to the decoding requests, one each in turn. Returns the rows it took.
fn share_in_turn(requests: &[&RequestView], decoding: &[usize], rows: usize, drafts: &mut [usize]) -> usize {
    let mut left = rows;
    loop {
        let before = left;
        for &index in decoding {
            if left > 0 && drafts[index] < requests[index].drafts {
                drafts[index] += 1;
                left -= 1;
            }
        }
        if left == before {
            return rows - left;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn views(list: &[(usize, usize)], first: u64) -> Vec<RequestView> {
        (first..)
            .zip(list)
            .map(|(request, &(pending, drafts))| RequestView { request, pending, drafts })
            .collect()
    }

    fn spans(plan: &Plan) -> Vec<(u64, usize, usize)> {
        plan.spans.iter().map(|span| (span.request, span.sure, span.drafts)).collect()
    }

    #[test]
    fn decode_rows_ride_along_with_a_long_prompt() {
        let running = views(&[(1, 0), (100_000, 0), (1, 0)], 0);
        let plan = plan(&View { running, waiting: vec![], places: 0, rows: 16 });
        assert_eq!(spans(&plan), [(0, 1, 0), (1, 14, 0), (2, 1, 0)]);
    }

    #[test]
    fn a_short_prompt_is_not_stuck_behind_a_long_one() {
        let running = views(&[(100_000, 0)], 0);
        let waiting = views(&[(5, 0)], 1);
        let plan = plan(&View { running, waiting, places: 1, rows: 64 });
        assert_eq!(plan.admitted, 1);
        assert_eq!(spans(&plan), [(0, 59, 0), (1, 5, 0)]);
    }

    #[test]
    fn drafts_leave_half_of_the_rest_to_a_prompt() {
        let running = views(&[(1, 8), (1, 8), (50, 0)], 0);
        let plan = plan(&View { running, waiting: vec![], places: 0, rows: 12 });
        assert_eq!(spans(&plan), [(0, 1, 3), (1, 1, 2), (2, 5, 0)]);
    }

    #[test]
    fn nobody_is_admitted_without_a_place_or_a_row() {
        let running = views(&[(1, 0), (1, 0)], 0);
        let waiting = views(&[(4, 0), (4, 0)], 2);
        let full = View { running: running.clone(), waiting: waiting.clone(), places: 0, rows: 16 };
        assert_eq!(plan(&full).admitted, 0);
        let narrow = View { running, waiting, places: 2, rows: 2 };
        assert_eq!(plan(&narrow).admitted, 0);
    }

    fn view() -> impl Strategy<Value = View> {
        let request = (prop_oneof![Just(1_usize), 1..2000_usize], 0..9_usize);
        let list = prop::collection::vec(request, 0..20);
        (list.clone(), list, 0..8_usize, 1..700_usize).prop_map(|(running, waiting, places, rows)| View {
            rows: rows.max(running.len()),
            running: views(&running, 0),
            waiting: views(&waiting, 100),
            places,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn a_plan_keeps_its_promises(view in view()) {
            let plan = plan(&view);
            let rows: usize = plan.spans.iter().map(|span| span.sure + span.drafts).sum();
            prop_assert!(rows <= view.rows);
            prop_assert!(plan.admitted <= view.places.min(view.waiting.len()));

            // Spans are a subsequence of the requests in age order, newcomers are the oldest waiting.
            let candidates: Vec<&RequestView> = view.running.iter().chain(&view.waiting[..plan.admitted]).collect();
            let mut rest = candidates.iter();
            for span in &plan.spans {
                let of = rest.find(|request| request.request == span.request).unwrap();
                prop_assert!(span.sure >= 1 && span.sure <= of.pending);
                prop_assert!(span.drafts <= of.drafts);
                prop_assert!(span.drafts == 0 || span.sure == of.pending);
            }
            let span_of = |request: &RequestView| plan.spans.iter().find(|span| span.request == request.request);
            prop_assert!(view.waiting[..plan.admitted].iter().all(|request| span_of(request).is_some()));

            // Every decode row rides along, and the oldest prompt moves.
            for request in view.running.iter().filter(|request| request.pending == 1) {
                prop_assert_eq!(span_of(request).map(|span| span.sure), Some(1));
            }
            if let Some(oldest) = view.running.iter().find(|request| request.pending > 1) {
                prop_assert!(span_of(oldest).is_some());
            }

            // No row is left free while an admissible prompt has pending tokens.
            let admissible = view.waiting.len().min(view.places);
            let hungry = view.running.iter().chain(&view.waiting[..admissible])
                .any(|request| span_of(request).map_or(0, |span| span.sure) < request.pending);
            prop_assert!(!hungry || rows == view.rows);
        }

        #[test]
        fn every_prompt_is_read_in_the_end(prompts in prop::collection::vec(1..300_usize, 1..12), rows in 12..64_usize) {
            let mut pending = prompts;
            for _ in 0..4000 {
                let running: Vec<RequestView> = (0..).zip(&pending).filter(|(_, pending)| **pending > 0)
                    .map(|(request, &pending)| RequestView { request, pending, drafts: 0 }).collect();
                if running.is_empty() {
                    return Ok(());
                }
                let plan = plan(&View { running, waiting: vec![], places: 0, rows });
                prop_assert!(!plan.spans.is_empty());
                for span in plan.spans {
                    pending[span.request as usize] -= span.sure;
                }
            }
            prop_assert!(false, "never done: {pending:?}");
        }
    }
}
