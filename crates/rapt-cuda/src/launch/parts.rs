//! What each launch over sequences of lengths of their own is for, in words: which of them it takes, as the kernels tell them apart.
//!
//! Deliberately absent: who takes what (`select`), which is read here from what is launched.

use std::ops::Range;

use rapt_core::{PlanPart, Spec};

use super::{Append, Attend, CudaLaunch, Launches, Step, Varlen, VarlenLaunch};
use crate::params::MOST_LEN;

/// Numbers of keys, as launches tell sequences apart: from the first to below the second, or any other number where that is less. `None` for
/// all.
fn keys(of: &Range<usize>) -> Option<String> {
    let Range { start, end } = *of;
    match (start, end) {
        (0, MOST_LEN..) => None,
        (0, _) => Some(format!("fewer than {end} keys")),
        (_, MOST_LEN..) => Some(format!("{start} keys or more")),
        _ if start < end => Some(format!("{start} to {} keys", end - 1)),
        _ => Some(format!("fewer than {end} keys, or {start} or more")),
    }
}

/// Sequences, and what is said of their keys.
fn with_keys(sequences: &str, of: &Range<usize>) -> String {
    keys(of).map_or(sequences.to_owned(), |keys| format!("{sequences} and {keys}"))
}

impl Varlen {
    /// What `launch` takes.
    fn takes(&self, launch: &VarlenLaunch) -> String {
        let (takes, [queries, rows]) = (&launch.takes, self.params.few());
        let (few, is_all) = (&takes.few, takes.few == (0..rows + 1));
        let sequences = match (takes.many, few.is_empty()) {
            (true, true) => "sequences of more queries".to_owned(),
            (true, false) => "all sequences".to_owned(),
            (false, _) if is_all => format!("sequences of up to {queries} queries, {rows} rows of a head of k"),
            (false, _) if few.start == 0 => {
                format!("sequences of up to {queries} queries, {} rows of a head of k", few.end - 1)
            }
            (false, _) => {
                format!("sequences of up to {queries} queries, {} to {} rows of a head of k", few.start, few.end - 1)
            }
        };
        with_keys(&sequences, &takes.keys)
    }
}

impl Attend {
    /// Sequences of a cache that it takes.
    fn takes(&self) -> String {
        let tiles = self.hopper.as_ref().and_then(|hopper| hopper.tiles.as_ref());
        let of = tiles.and_then(|tiles| keys(&tiles.keys));
        of.map_or("all sequences".to_owned(), |keys| format!("sequences of {keys}"))
    }
}

impl CudaLaunch {
    /// Every launch over sequences of lengths of their own.
    pub(super) fn parts_of(&self, spec: &Spec) -> Vec<PlanPart> {
        let Some(launches) = &self.launches else { return Vec::new() };
        let part = |step: &Step, serves: String, attends: bool| PlanPart {
            kernel: attends.then(|| step.variant.algorithm.kernel()),
            variant: step.variant.to_string(),
            serves,
            launch: self.launch_of(step),
        };
        let Launches { main, short, combine, append, varlen, .. } = launches;
        if let Some(varlen) = varlen {
            let found = "finds the sequences, deals them to the launches behind it, and fills rows of none with zeros";
            let attending = varlen.launches.iter().map(|launch| part(&launch.attend.step, varlen.takes(launch), true));
            return std::iter::once(part(&varlen.deal, found.to_owned(), false)).chain(attending).collect();
        }
        if spec.lengths.is_none() {
            return Vec::new();
        }
        let append = append.iter().map(|Append { step, .. }| part(step, "writes new keys".to_owned(), false));
        let attending = short.iter().map(|short| &**short).chain([main]);
        let attending = attending.map(|attend| part(&attend.step, attend.takes(), true));
        let combine = combine.iter().map(|step| part(step, "puts the chunks of rows together".to_owned(), false));
        append.chain(attending).chain(combine).collect()
    }
}
