//! Which fault it is, and what repairs it.
//!
//! A fault is named by its repair: each hypothesis changes one thing of one side (an offset, a unit, the packing, the order of
//! numbering, the swizzle) and is compared again on all elements. The first that holds is the class. If it holds but for one
//! distance, the offset is a second fault. If none holds, what is read and never written is `uncovered`, and everything else
//! `permuted`. Repairs pass the same comparison before they are listed.

use super::fault::{Fault, Finding, Repair};
use super::register_reuse::{Feed, feed_tables};
use super::report::Report;
use super::side::{NOWHERE, Order, Side, Source, Stored, Table};
use super::{Check, agree, delta, overlap};
use crate::atlas::Atom;
use crate::composed::ComposedLayout;
use crate::error::Result;
use crate::layout::Layout;
use crate::unit::{Space, Unit};

pub(super) struct Diagnosis {
    pub(super) faults: Vec<Finding>,
    pub(super) repairs: Vec<Repair>,
    pub(super) feed: Option<Feed>,
}

/// A change of one side, with the fault that it would repair.
struct Hypothesis {
    fault: Fault,
    why: String,
    is_producer: bool,
    side: Side,
    /// Whether the changed side is something a person would write.
    is_repair: bool,
}

/// What a hypothesis turned out to be.
struct Outcome {
    hypothesis: Hypothesis,
    distance: i64,
}

pub(super) fn diagnose(check: &Check, wrote: &Table, reads: &Table, report: &Report) -> Result<Diagnosis> {
    let mut found = Diagnosis { faults: Vec::new(), repairs: Vec::new(), feed: None };
    if wrote.space == Space::Registers {
        let feed = feed_tables(wrote, reads);
        found.repairs = feed.repairs(&check.consumer);
        found.feed = Some(feed);
    }
    if let Some((a, b)) = overlap(wrote) {
        let at = |index: usize| (index % wrote.rows, index / wrote.rows);
        let place = wrote.place(wrote.address[b]);
        let why = format!("elements {:?} and {:?} are both written to {place}", at(a), at(b));
        found.faults.push(Finding { class: Fault::Overlapped, why });
    }
    let outcome = search(check, wrote, reads);
    if let Some(Outcome { hypothesis, distance }) = &outcome {
        found.faults.push(Finding { class: hypothesis.fault, why: hypothesis.why.clone() });
        if *distance != 0 && hypothesis.fault != Fault::MissingColumnOffset {
            found.faults.push(missing_offset(wrote, reads, *distance));
        }
        if hypothesis.is_repair && !fixed(check, hypothesis.is_producer) {
            let repaired = if *distance == 0 {
                Some(hypothesis.side.clone())
            } else {
                moved(&hypothesis.side, if hypothesis.is_producer { *distance } else { -distance })
            };
            found.repairs.extend(repaired.and_then(|side| {
                let other = if hypothesis.is_producer { reads } else { wrote };
                prove(other, hypothesis.is_producer, side, &hypothesis.why)
            }));
        }
    }
    // Another count is a symptom where something else was named, and the fault where nothing was.
    for (who, table) in [("producer", wrote), ("consumer", reads)] {
        if let Some((has, moves)) = table.count {
            let why = format!("the {who} has {has} values in a row or thread and places for {moves}");
            if !found.faults.iter().any(|finding| finding.class == Fault::CountPerThread) {
                found.faults.push(Finding { class: Fault::CountPerThread, why });
            }
        }
    }
    if found.repairs.is_empty() {
        found.repairs.extend(through_the_other(check, wrote, reads));
    }
    if found.faults.is_empty() {
        let finding = if report.poisoned > 0 {
            let first = report.first_poison.as_ref().map(ToString::to_string).unwrap_or_default();
            Finding { class: Fault::Uncovered, why: format!("{} readings find nothing; {first}", report.poisoned) }
        } else {
            let why = format!("{} elements are there, but in places of others", report.disagreements);
            Finding { class: Fault::Permuted, why }
        };
        found.faults.push(finding);
    }
    Ok(found)
}

fn fixed(check: &Check, is_producer: bool) -> bool {
    if is_producer { check.producer.is_fixed } else { check.consumer.is_fixed }
}

fn missing_offset(wrote: &Table, reads: &Table, distance: i64) -> Finding {
    let (write, read) = (wrote.at(0, 0), reads.at(0, 0));
    let (lanes, columns) = (distance >> 21, (distance & ((1 << 21) - 1)) >> 5);
    let far = match wrote.space {
        Space::Tmem if distance % 32 == 0 => format!("{lanes} lanes and {columns} columns"),
        Space::Registers => format!("{distance} bits"),
        _ if distance % 8 == 0 => format!("{} bytes", distance / 8),
        _ => format!("{distance} bits"),
    };
    let why = format!(
        "everything is read {far} after where it was written: element (0, 0) at {} instead of {}",
        reads.place(read),
        wrote.place(write)
    );
    Finding { class: Fault::MissingColumnOffset, why }
}

/// The first hypothesis that holds, exactly if one does, else but for a distance.
fn search(check: &Check, wrote: &Table, reads: &Table) -> Option<Outcome> {
    if let Some(distance) = delta(wrote, reads).filter(|distance| *distance != 0) {
        let finding = missing_offset(wrote, reads, distance);
        let is_producer = !check.producer.is_fixed || check.consumer.is_fixed;
        let side = if is_producer { &check.producer } else { &check.consumer };
        let repaired = moved(side, if is_producer { distance } else { -distance });
        let is_repair = repaired.is_some();
        let side = repaired.unwrap_or_else(|| side.clone());
        let hypothesis = Hypothesis { fault: finding.class, why: finding.why, is_producer, side, is_repair };
        return Some(Outcome { hypothesis, distance: 0 });
    }
    let mut nearly = None;
    let mut all = hypotheses(&check.consumer, &check.producer, false);
    all.extend(hypotheses(&check.producer, &check.consumer, true));
    // What hardware fixes is the last to be doubted.
    all.sort_by_key(|hypothesis| fixed(check, hypothesis.is_producer));
    for hypothesis in all {
        let other = if hypothesis.is_producer { reads } else { wrote };
        if !probe(&hypothesis.side, other, reads) {
            continue;
        }
        let Ok(table) = hypothesis.side.table() else { continue };
        let distance = if hypothesis.is_producer { delta(&table, reads) } else { delta(wrote, &table) };
        match distance {
            Some(0) => return Some(Outcome { hypothesis, distance: 0 }),
            Some(distance) if nearly.is_none() => nearly = Some(Outcome { hypothesis, distance }),
            _ => {}
        }
    }
    nearly
}

/// Whether a few elements lie at one distance from `other`'s: most hypotheses fail here, before a table is made.
fn probe(side: &Side, other: &Table, tile: &Table) -> bool {
    let Source::Stored(stored) = &side.source else { return true };
    let mut first = None;
    let samples = |len: usize| [0, 1, len / 2, len - 1];
    for (row, col) in samples(tile.rows).into_iter().flat_map(|row| samples(tile.cols).map(move |col| (row, col))) {
        let (Ok(Some(address)), there) = (side.stored_at(stored, row, col), other.at(row, col)) else { return false };
        if there == NOWHERE || *first.get_or_insert(address - there) != address - there {
            return false;
        }
    }
    true
}

/// Everything that could be wrong with one side, the likeliest first.
fn hypotheses(side: &Side, other: &Side, is_producer: bool) -> Vec<Hypothesis> {
    let who = if is_producer { "producer" } else { "consumer" };
    let mut found = Vec::new();
    let mut push = |fault, why: String, source: Source, is_repair| {
        let side = Side { source, dtype: other.dtype, ..side.clone() };
        found.push(Hypothesis { fault, why, is_producer, side, is_repair });
    };
    match &side.source {
        Source::Stored(stored) => {
            for (unit, offset_unit) in units(stored, side) {
                let why = if unit == stored.unit {
                    format!(
                        "the {who}'s offset {} is right in {offset_unit}, not in {}",
                        stored.offset, stored.offset_unit
                    )
                } else if let Unit::TileElements { bits, pitch } = unit {
                    format!(
                        "the {who}'s numbers are taken as {}, but they count {bits}-bit elements of a tile with {pitch} to a \
                         row; a row of tensor memory is a lane, {} such elements further",
                        stored.unit,
                        65536 * 32 / i64::from(bits)
                    )
                } else {
                    format!("the {who}'s numbers are taken as {}, but they count {unit}", stored.unit)
                };
                let is_repair = !matches!(unit, Unit::TileElements { .. });
                push(Fault::UnitMixUp, why, Source::Stored(Stored { unit, offset_unit, ..stored.clone() }), is_repair);
            }
            let bits = i64::from(other.dtype.bits());
            for packed in [1, 2, 4].into_iter().filter(|packed| packed * bits <= i64::from(stored.unit.bits())) {
                if packed != stored.packed || side.dtype != other.dtype {
                    let why = format!(
                        "the {who} puts {} elements of {} bits into one of {}, the other side {packed} of {bits} bits",
                        stored.packed,
                        side.dtype.bits(),
                        stored.unit
                    );
                    let layout = fitted(stored, side, packed);
                    push(Fault::Packing, why, Source::Stored(Stored { packed, layout, ..stored.clone() }), true);
                }
            }
            let orders = [Order::ColumnMajor, Order::RowMajor, Order::UndoneRowMajor];
            for order in orders.into_iter().filter(|order| *order != stored.order) {
                let why = format!("the {who} numbers the tile by rows where the other side numbers it by columns");
                let source = Source::Stored(Stored { order, ..stored.clone() });
                push(Fault::Transposed, why, source, order != Order::UndoneRowMajor);
            }
            if stored.unit.space() == Space::Shared && stored.layout.swizzle().is_identity() {
                for span in [0, 32, 64, 128].into_iter().filter(|span| *span != stored.span) {
                    let name =
                        |span| if span == 0 { "no swizzle".to_owned() } else { format!("a {span}-byte swizzle") };
                    let why = format!("the {who} has {}, the other side {}", name(stored.span), name(span));
                    push(Fault::WrongSwizzle, why, Source::Stored(Stored { span, ..stored.clone() }), true);
                }
            }
        }
        Source::Moved { tv, by, offset, packed } => {
            for per_register in [1, 2, 4].into_iter().filter(|n| n * i64::from(other.dtype.bits()) <= 32) {
                if per_register != *packed {
                    let why = format!("the {who} has {packed} values in a register, the other side {per_register}");
                    let source =
                        Source::Moved { tv: tv.clone(), by: by.clone(), offset: *offset, packed: per_register };
                    push(Fault::Packing, why, source, true);
                }
            }
            if let Some((stem, count)) = by.name.rsplit_once(".x") {
                for more in (0..8).map(|log| 1i64 << log) {
                    let name = format!("{stem}.x{more}");
                    let Ok(by) = Atom::named(&name) else { continue };
                    let why = format!("the {who} moves x{count}, where its registers take x{more}");
                    let source = Source::Moved { tv: tv.clone(), by, offset: *offset, packed: *packed };
                    push(Fault::CountPerThread, why, source, true);
                }
            }
        }
        Source::Registers { .. } => {}
    }
    found
}

/// The layout cut to the tile's cells, where that is a layout.
fn fitted(stored: &Stored, side: &Side, packed: i64) -> ComposedLayout {
    let tile = Layout::column_major([side.rows, (side.cols / packed).max(1)]);
    let is_larger = stored.layout.layout().size() * packed > side.rows * side.cols;
    let cut = tile.and_then(|tile| stored.layout.compose(&tile)).ok().filter(|_| is_larger);
    cut.unwrap_or_else(|| stored.layout.clone())
}

/// Other units for a side's numbers and its offset.
fn units(stored: &Stored, side: &Side) -> Vec<(Unit, Unit)> {
    let bits = side.dtype.bits();
    let mut units = match stored.unit.space() {
        Space::Tmem => vec![Unit::TmemCells, Unit::TmemElements(bits), Unit::TmemElements(16), Unit::TmemElements(8)],
        Space::Shared => vec![Unit::SharedBytes, Unit::SharedElements(bits), Unit::SharedElements(32)],
        Space::Memory => vec![Unit::Bytes, Unit::Elements(bits), Unit::Elements(32)],
        Space::Registers => Vec::new(),
    };
    if stored.unit.space() == Space::Tmem {
        // A tile counted in itself: the step from row to row is its pitch.
        let pitch = stored.layout.layout().at(1).ok().and_then(|pitch| u32::try_from(pitch).ok());
        if let Some(pitch) = pitch.filter(|pitch| (2..=4096).contains(pitch)) {
            let widths = [bits, stored.unit.bits()];
            units.extend(widths.map(|bits| Unit::TileElements { bits, pitch }));
        }
    }
    units.dedup();
    let mut pairs = Vec::new();
    for unit in &units {
        pairs.push((*unit, stored.offset_unit));
        if !matches!(unit, Unit::TileElements { .. }) {
            pairs.push((stored.unit, *unit));
            pairs.push((*unit, *unit));
        }
    }
    pairs.retain(|pair| *pair != (stored.unit, stored.offset_unit));
    pairs
}

/// The side, `distance` bits further.
fn moved(side: &Side, distance: i64) -> Option<Side> {
    let source = match &side.source {
        Source::Stored(stored) => {
            // A distance that the side's own unit cannot say is said in a finer one.
            let step = i64::from(stored.offset_unit.bits());
            let total = stored.offset.checked_mul(step)?.checked_add(distance)?;
            let finer = match stored.unit.space() {
                Space::Tmem => Unit::TmemElements(8),
                Space::Shared => Unit::SharedBytes,
                _ => Unit::Bytes,
            };
            let unit = [stored.offset_unit, finer].into_iter().find(|unit| total % i64::from(unit.bits()) == 0)?;
            let offset = total / i64::from(unit.bits());
            Source::Stored(Stored { offset, offset_unit: unit, ..stored.clone() })
        }
        Source::Moved { tv, by, offset, packed } if distance % 32 == 0 => {
            Source::Moved { tv: tv.clone(), by: by.clone(), offset: offset + distance / 32, packed: *packed }
        }
        _ => return None,
    };
    Some(Side { source, ..side.clone() })
}

/// The repair, if the check holds with it.
fn prove(other: &Table, is_producer: bool, side: Side, how: &str) -> Option<Repair> {
    let table = side.table().ok()?;
    let (wrote, reads) = if is_producer { (&table, other) } else { (other, &table) };
    let exists = |address: &i64| *address != NOWHERE && table.place(*address).exists();
    if !agree(wrote, reads) || !table.address.iter().all(exists) || is_producer && overlap(wrote).is_some() {
        return None;
    }
    Some(Repair {
        change: if is_producer { "store" } else { "read" },
        how: how.to_owned(),
        notation: side.notation(),
        proven_elements: reads.address.len(),
        side: Some(side),
    })
}

/// Store where the consumer reads; or, where that cannot be, read where the producer stores.
fn through_the_other(check: &Check, wrote: &Table, reads: &Table) -> Option<Repair> {
    let store = || {
        if check.producer.is_fixed {
            return None;
        }
        let repaired = expressed(&check.consumer, &check.producer, false);
        let how = "store each element where the consumer reads it";
        repaired.into_iter().find_map(|side| prove(reads, true, side, how))
    };
    let read = || {
        if check.consumer.is_fixed || overlap(wrote).is_some() {
            return None;
        }
        let repaired = expressed(&check.producer, &check.consumer, true);
        let how =
            "read each element where the producer stores it: the store's layout, recast to the width that is read";
        repaired.into_iter().find_map(|side| prove(wrote, false, side, how))
    };
    store().or_else(read)
}

/// `from`'s map in the words of `to`: in `to`'s unit and packing if the layout recasts, else as it is.
fn expressed(from: &Side, to: &Side, is_read: bool) -> Vec<Side> {
    let Source::Stored(map) = &from.source else { return Vec::new() };
    // A reader of fewer columns stays one; a store has at least those that are read.
    let cols = if is_read { from.cols.min(to.cols) } else { from.cols };
    let mut sides = Vec::new();
    let mut push = |stored: Stored| {
        sides.push(Side {
            about: to.about.clone(),
            dtype: from.dtype,
            rows: from.rows,
            cols,
            source: Source::Stored(stored),
            is_fixed: false,
        });
    };
    let bits = i64::from(from.dtype.bits());
    if let Source::Stored(target) = &to.source
        && map.unit != target.unit
        && !matches!(target.unit, Unit::TileElements { .. })
        && map.layout.plain().is_some()
    {
        let (old, new) = (i64::from(map.unit.bits()), i64::from(target.unit.bits()));
        let total = map.offset * i64::from(map.offset_unit.bits());
        // Whole cells that hold `packed` elements of a row become the elements, and the other way round.
        let is_whole = old == map.packed * bits && new % bits == 0 && total % new == 0;
        let recast = (|| {
            let flat = map.layout.layout().coalesce();
            let rows = flat.compose(&Layout::column_major([from.rows, from.cols / map.packed]).ok()?).ok()?;
            let recast = rows.recast(old, new).ok()?;
            recast.compose(&Layout::column_major([from.rows, cols / (new / bits).max(1)]).ok()?).ok()
        })();
        if let Some(layout) = recast.filter(|_| is_whole) {
            push(Stored {
                layout: layout.into(),
                unit: target.unit,
                offset: total / new,
                offset_unit: target.unit,
                packed: new / bits,
                ..map.clone()
            });
        }
    }
    if cols == from.cols {
        push(map.clone());
    }
    sides
}
