//! Sequences that lie one after another: which launches serve them together.
//!
//! A call for one of them alone runs a kernel that its lengths choose. The host does not know these: each kernel that may be asked for is
//! launched, and takes those sequences that are its. Deliberately absent: which those are (varlen.cu), and where keys are split
//! among blocks, as there is no bound on what blocks would hand over.

use std::ops::Range;

use rapt_core::{Error, Kernel, Result, Spec};

use super::rules::{self, Lengths};
use super::{Caps, MOST_BLOCKS, decode, hopper, latent, too_many_blocks, widths};
use crate::codes::Codes;
use crate::launch::{Attend, Launches, Step, Varlen, VarlenLaunch, WhyGeneric};
use crate::params::{DroppingParams, LaunchParams, MOST_LEN, Params};
use crate::partition::{ChunkRule, Partition};
use crate::variant::{Algorithm, KernelVariant, generic_columns};
use crate::varlen::{MOST_LAUNCHES, Takes, VarlenParams, table_bytes};

/// How many units the sequences of a launch have may be divided by any small number: work moves on from round to round by so many blocks
/// that none of them has the same piece of each sequence.
const MANY_DIVISORS: usize = 2 * 3 * 5 * 7 * 11 * 13 * 17;

/// A launch before its place in the workspace is known.
struct Asked {
    variant: KernelVariant,
    why_generic: Option<WhyGeneric>,
    many: bool,
    /// Rows of a head of keys of those with few queries.
    few: Range<usize>,
    keys: Range<usize>,
}

/// What sequences of these totals with few queries may ask for, with more rows last: over codes tiles follow from rows.
fn few_queries(spec: &Spec, caps: &Caps) -> Vec<Asked> {
    let (most, total) = (decode::DECODE_ROWS, spec.group_size().saturating_mul(spec.q_len()));
    let of = |few: Range<usize>| {
        // Sequences without keys get zeros of any kernel.
        let lengths = Lengths { few: true, rows: few.end - 1, kv_len: spec.kv_len().min(1) };
        let (variant, why_generic) = rules::variant(spec, caps, lengths);
        Asked { variant, why_generic, many: false, few, keys: 0..MOST_LEN }
    };
    let (fewer, more) = (of(0..decode::FEW_ROWS + 1), of(decode::FEW_ROWS + 1..most + 1));
    if fewer.variant == more.variant {
        return vec![Asked { few: 0..most + 1, ..more }];
    }
    let are_asked = [spec.group_size() <= decode::FEW_ROWS, total > decode::FEW_ROWS];
    [fewer, more].into_iter().zip(are_asked).filter_map(|(launch, is_asked)| is_asked.then_some(launch)).collect()
}

/// What sequences of these totals may ask for, the most work last.
fn asked(spec: &Spec, caps: &Caps) -> Vec<Asked> {
    let total_kv = spec.kv_len();
    let many = |keys: Range<usize>| {
        let lengths = Lengths { few: false, rows: 0, kv_len: if total_kv == 0 { 0 } else { keys.start.max(1) } };
        let (variant, why_generic) = rules::variant(spec, caps, lengths);
        Asked { variant, why_generic, many: true, few: 0..0, keys }
    };
    let mut all = few_queries(spec, caps);
    if decode::is_few(spec) {
        return all;
    }
    let keys = hopper::few_keys(spec);
    let long = many(keys.end..if keys.start > 0 { keys.start } else { MOST_LEN });
    let short = many(keys.clone());
    if let [few] = &mut all[..]
        && few.variant == short.variant
    {
        few.many = true;
        return all;
    }
    if long.variant == short.variant || total_kv < keys.start {
        all.push(Asked { keys: 0..MOST_LEN, ..long });
    } else if keys.start == 0 && total_kv < keys.end {
        all.push(short);
    } else {
        all.extend([short, long]);
    }
    all
}

/// Whether one sequence of many queries, alone, runs on wide.cu.
fn is_wide_alone(spec: &Spec, caps: &Caps) -> bool {
    let mut alone = spec.clone();
    alone.varlen = None;
    let lengths = Lengths { few: false, rows: 0, kv_len: spec.kv_len() };
    rules::variant(&alone, caps, lengths).0.algorithm == Algorithm::Wide
}

/// Whether one sequence of few queries, alone, runs on latent.cu.
fn is_latent_alone(spec: &Spec, caps: &Caps) -> bool {
    !spec.is_quantized()
        && spec.dropout.is_none()
        && latent::has_dims(spec)
        && latent::variant(spec, caps).shared_bytes() <= caps.shared_bytes
}

impl Asked {
    /// Its launch, with its table from byte `table` of the workspace on; beside it how long that is.
    fn launch(&self, spec: &Spec, caps: &Caps, table: usize) -> Result<(VarlenLaunch, Partition, usize)> {
        let variant = self.variant;
        let is_decode = matches!(variant.algorithm, Algorithm::Decode | Algorithm::DecodeCodes);
        let is_hopper = variant.algorithm == Algorithm::Hopper;
        let task_heads = if is_decode { spec.group_size() } else { 1 };
        let (tasks, rows) = (spec.num_q_heads() / task_heads, task_heads * spec.q_len());
        let item_rows = variant.block_m as usize;
        let paired = is_hopper && !spec.block_range().is_unbounded();
        let sequences = spec.varlen.as_deref().map_or(0, rapt_core::VarlenSpec::sequences);
        // No row is of two sequences, and each has at most one block of rows that is not full.
        let units = (rows / item_rows).saturating_add(sequences).max(1);
        let columns = generic_columns(spec.numerics.storage) as usize;
        let dv_blocks =
            if variant.algorithm.kernel() == Kernel::Generic { spec.head_dim_v().div_ceil(columns) } else { 1 };
        let most = units.saturating_mul(tasks).saturating_mul(dv_blocks);
        if most > MOST_BLOCKS {
            return Err(too_many_blocks(most));
        }
        let blocks = match variant.algorithm {
            Algorithm::Decode | Algorithm::DecodeCodes => most.min(decode::slots(caps, &variant)),
            Algorithm::Hopper => most.min(caps.multiprocessors.max(1) as usize),
            _ => most,
        };
        let partition = Partition {
            task_heads,
            tasks,
            rows,
            item_rows,
            short_items: 0,
            paired,
            row_blocks: if is_hopper { MANY_DIVISORS } else { 1 },
            num_splits: 1,
            chunk: 0,
            dv_blocks,
            items: units.saturating_mul(tasks),
            is_combined: false,
        };
        let params = Params::new(spec, &partition, widths(spec, &variant));
        let chunks = match self.few.is_empty() || variant.dropout {
            true => ChunkRule { keys: [1 << 30; 3], long_from: [0; 2] },
            false => decode::chunk_rule(&variant),
        };
        let (many, few, keys) = (self.many, self.few.clone(), self.keys.clone());
        let hopper = is_hopper
            .then(|| Box::new(hopper::launch(spec, &variant, &partition, &params, blocks.max(1), 0..MOST_LEN)));
        let beside = (variant.codes != Codes::None).then(|| Box::new(LaunchParams::new(spec, &params, None, 0)));
        let dropping = variant.dropout.then(|| DroppingParams::new(spec.dropout));
        let launch = VarlenLaunch {
            attend: Attend { step: Step::new(variant, blocks), params, hopper, beside, dropping },
            takes: Takes { many, few, keys, task_heads, item_rows, paired, chunks, table },
        };
        Ok((launch, partition, table_bytes(units)))
    }
}

/// The launches of sequences that lie one after another.
///
/// # Errors
/// [`rapt_core::Error::Unsupported`] for counts beyond 2^31, and for head dims that a sequence alone has wide.cu or latent.cu for.
pub(super) fn launches(spec: &Spec, caps: &Caps) -> Result<Launches> {
    if (!decode::is_few(spec) && is_wide_alone(spec, caps)) || is_latent_alone(spec, caps) {
        return Err(Error::unsupported(
            format!("sequences one after another at head dim {}", spec.head_dim().max(spec.head_dim_v())),
            "the kernel that each alone would run on reads no offsets, and another would give other bits",
            "call `rapt.attention` for each sequence",
        ));
    }
    let all = asked(spec, caps);
    let (mut made, mut workspace_bytes) = (Vec::with_capacity(all.len()), 0usize);
    let mut of_main = None;
    for asked in &all {
        let (launch, partition, bytes) = asked.launch(spec, caps, workspace_bytes)?;
        workspace_bytes = workspace_bytes.saturating_add(bytes);
        of_main = Some((launch.clone(), partition, asked.why_generic));
        made.push(launch);
    }
    let Some((main, partition, why_generic)) = of_main else { unreachable!("a launch for few queries at least") };
    debug_assert!(made.len() <= MOST_LAUNCHES, "VarlenParams has no room for {} launches", made.len());
    let (main, few) = (main.attend, [decode::DECODE_QUERIES, decode::DECODE_ROWS]);
    let dealt = VarlenParams::new(spec, &main.params, few, made.iter().map(|launch| &launch.takes));
    // One block deals, the others look for rows of no sequence.
    let blocks = 1 + (caps.multiprocessors.max(1) as usize).min(spec.q_len());
    let deal = Step::new(main.step.variant.varlen(), blocks);
    Ok(Launches {
        main: Attend { hopper: None, beside: None, ..main },
        short: None,
        append: None,
        combine: None,
        // Of all sequences together.
        partition: Partition { row_blocks: 1, ..partition },
        varlen: Some(Box::new(Varlen { deal, params: dealt, launches: made })),
        workspace_bytes,
        why_generic,
    })
}
