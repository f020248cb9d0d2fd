//! Dropout of attention's probabilities: which of them are dropped, as a function of where they stand.
//!
//! ```text
//! (a, b, c, d)  = philox(counter = (offset's low half, offset's high half, batch, head), key = (seed's low half, seed's high half))
//! (w0 … w3)     = philox(counter = (c, group, d, row), key = (a, b))     the words of row `row` at the four columns of a group
//! dropped       where w < threshold,   threshold = ⌈p · 2³²⌉
//! weight        = 0 where dropped, else p_ij / (1 − p)
//! ```
//!
//! A group is columns `n, n + 1, n + 8, n + 9`: of sixteen columns, group t has 2t, 2t + 1, 2t + 8 and 2t + 9, so that one block is what a lane of
//! a GPU's matrix instruction holds of a row, and keys that lie in pairs stay beside one another. For one seed all of this is injective: no two positions of
//! any two offsets have a block in common. Row and group stand where a round of Philox only adds them, and meet in the fourth: the three before
//! are the same along a row or down a column.
//!
//! Source: Salmon, Moraes, Dror and Shaw 2011, *Parallel Random Numbers: As Easy as 1, 2, 3* (Philox 4x32-10 and its constants). Deliberately absent: a
//! state that goes on from call to call: whoever draws seed and offset keeps it.

use crate::{Device, Error, Finite, Result};

/// What the words of a counter are multiplied with.
pub const PHILOX_MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];

/// What a key grows by from round to round.
pub const PHILOX_INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Rounds of Philox.
pub const PHILOX_ROUNDS: usize = 10;

/// The block of `counter` under `key`: Philox 4x32-10.
#[inline]
#[must_use]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let product = |word: u32, multiplier: u32| {
        let product = u64::from(word) * u64::from(multiplier);
        ((product >> 32) as u32, product as u32)
    };
    let (mut c, mut key) = (counter, key);
    for _ in 0..PHILOX_ROUNDS {
        let (high0, low0) = product(c[0], PHILOX_MULTIPLIERS[0]);
        let (high1, low1) = product(c[2], PHILOX_MULTIPLIERS[1]);
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0];
        key = [key[0].wrapping_add(PHILOX_INCREMENTS[0]), key[1].wrapping_add(PHILOX_INCREMENTS[1])];
    }
    c
}

/// How often a probability is dropped; of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dropout(Finite);

impl Dropout {
    /// Dropout with probability `p`; none where it is 0.
    ///
    /// # Errors
    /// [`Error::Option`] outside 0 to 1.
    pub fn new(p: f64) -> Result<Option<Self>> {
        if !(0.0..=1.0).contains(&p) {
            let allowed = "a probability: 0 to 1, both included".into();
            return Err(Error::Option { option: "dropout_p", got: p.to_string(), allowed });
        }
        if p == 0.0 { Ok(None) } else { Finite::new("dropout_p", p).map(|p| Some(Dropout(p))) }
    }

    /// The probability: above 0, at most 1.
    #[must_use]
    pub const fn p(self) -> f64 {
        self.0.get()
    }

    /// The largest word at which a probability is dropped: one less than `⌈p · 2³²⌉`.
    #[must_use]
    pub fn last_dropped(self) -> u32 {
        // Exact: p is scaled by a power of two, and what is above 0 rounds up to 1 at least.
        ((self.p() * (1u64 << 32) as f64).ceil() as u64).saturating_sub(1).min(u64::from(u32::MAX)) as u32
    }

    /// What a kept probability is multiplied with: `1 / (1 − p)`; 0 where none is kept.
    #[must_use]
    pub fn scale(self) -> f64 {
        if self.last_dropped() == u32::MAX { 0.0 } else { 1.0 / (1.0 - self.p()) }
    }
}

/// Which probabilities are dropped; of a run. Whoever draws it gives the same to forward and to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct DropoutSeed {
    /// What the generator was seeded with.
    pub seed: u64,
    /// Which of its draws this is.
    pub offset: u64,
    /// The place of the first batch entry among those of all calls with this draw: of a sequence in a ragged batch, its index there.
    pub first_batch: u32,
    /// Where a GPU's kernels find seed and offset when they run, in place of the two numbers above.
    pub memory: Option<DeviceDraw>,
}

/// Seed and offset in memory of a GPU: two u64 that its kernels read when they run, so that replays of one captured launch drop what each
/// finds there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceDraw {
    device: Device,
    address: usize,
}

impl DeviceDraw {
    /// The draw at `address`.
    ///
    /// # Errors
    /// [`Error::Option`] if the address is 0 or no multiple of 8.
    ///
    /// # Safety
    /// There lie two u64 in memory of `device`, seed and offset, until every run with them has ended.
    pub unsafe fn new(device: Device, address: usize) -> Result<Self> {
        if address == 0 || !address.is_multiple_of(align_of::<u64>()) {
            let allowed = "an address of two u64: a multiple of 8, not 0".into();
            return Err(Error::Option { option: "dropout_draw", got: format!("{address:#x}"), allowed });
        }
        Ok(DeviceDraw { device, address })
    }

    /// Where it lies in its device's memory.
    #[must_use]
    pub const fn address(self) -> usize {
        self.address
    }
}

impl DropoutSeed {
    /// A draw, for batch entries from 0 on.
    #[must_use]
    pub const fn new(seed: u64, offset: u64) -> Self {
        DropoutSeed { seed, offset, first_batch: 0, memory: None }
    }

    /// The draw that a GPU's kernels find in its memory, for batch entries from 0 on.
    #[must_use]
    pub const fn in_memory(draw: DeviceDraw) -> Self {
        DropoutSeed { memory: Some(draw), ..DropoutSeed::new(0, 0) }
    }

    /// The same draw for what comes after so many batch entries; [`check`](DropoutSeed::check) says whether they have numbers.
    #[must_use]
    pub const fn after(self, entries: usize) -> Self {
        DropoutSeed { first_batch: self.first_batch.wrapping_add(entries as u32), ..self }
    }

    /// That `batch` entries have numbers, and that `device` reads what lies in memory.
    ///
    /// # Errors
    /// [`Error::Option`] if one of them would be 2^32 or more; [`Error::DeviceMismatch`] where the draw lies on another device;
    /// [`Error::Unsupported`] of one that does not lie on an NVIDIA GPU.
    pub fn check(&self, batch: usize, device: Device) -> Result<()> {
        if let Some(DeviceDraw { device: got, .. }) = self.memory {
            if got != device {
                return Err(Error::DeviceMismatch { tensor: "dropout_draw", expected: device, got });
            }
            if !matches!(device, Device::Cuda(_)) {
                let why = "only kernels of NVIDIA GPUs read seed and offset when they run";
                return Err(Error::unsupported(
                    format!("dropout_draw in memory of {device}"),
                    why,
                    "seed and offset as numbers",
                ));
            }
        }
        if u64::from(self.first_batch) + batch as u64 <= 1 << 32 {
            return Ok(());
        }
        let allowed = format!("a number below 2^32 for each of {batch} batch entries");
        Err(Error::Option { option: "first_batch", got: self.first_batch.to_string(), allowed })
    }

    /// The blocks of one query head, by the two numbers: what lies in memory is a GPU's to read. `batch` counts from
    /// [`first_batch`](DropoutSeed::first_batch) on.
    #[inline]
    #[must_use]
    pub fn of_head(&self, batch: usize, head: usize) -> DropoutHead {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let ([low, high], key) = (halves(self.offset), halves(self.seed));
        let [a, b, c, d] = philox([low, high, self.first_batch.wrapping_add(batch as u32), head as u32], key);
        DropoutHead { key: [a, b], words: [c, d] }
    }
}

/// The blocks of one query head: a key of its own, and what stands beside row and group in every counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutHead {
    /// The key.
    pub key: [u32; 2],
    /// Words 0 and 2 of a counter.
    pub words: [u32; 2],
}

impl DropoutHead {
    /// The words of row `row` at the columns of a group.
    #[inline]
    #[must_use]
    pub fn block(&self, row: usize, group: usize) -> [u32; 4] {
        philox([self.words[0], group as u32, self.words[1], row as u32], self.key)
    }

    /// Whether the probability at this place is dropped.
    #[must_use]
    pub fn is_dropped(&self, dropout: Dropout, row: usize, column: usize) -> bool {
        let (group, word) = group_of_column(column);
        self.block(row, group)[word] <= dropout.last_dropped()
    }
}

/// The group that a column is of, and its place there.
#[inline]
#[must_use]
pub const fn group_of_column(column: usize) -> (usize, usize) {
    (column / 16 * 4 + column % 8 / 2, column % 2 + column % 16 / 8 * 2)
}

/// The column at place `word` of a group.
#[inline]
#[must_use]
pub const fn column_of_group(group: usize, word: usize) -> usize {
    group / 4 * 16 + group % 4 * 2 + word % 2 + word / 2 * 8
}

/// Whether every place of a problem has a number: q is `[batch, heads, rows, …]`.
pub(crate) fn is_placed([batch, heads, rows, _]: [usize; 4], columns: usize) -> bool {
    let most = 1u64 << 32;
    [batch, heads, rows].iter().all(|&n| n as u64 <= most) && columns as u64 <= most * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers() {
        // Random123's kat_vectors, philox4x32 10.
        let answers: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, block) in answers {
            assert_eq!(philox(counter, key), block, "{counter:x?} under {key:x?}");
        }
    }

    #[test]
    fn every_column_has_one_place_in_one_group() {
        for column in (0..1000).chain((1 << 34) - 100..1 << 34) {
            let (group, word) = group_of_column(column);
            assert_eq!(column_of_group(group, word), column);
            assert!(word < 4 && u32::try_from(group).is_ok());
        }
        assert_eq!([0, 1, 2, 3].map(|word| column_of_group(5, word)), [18, 19, 26, 27]);
    }

    #[test]
    fn a_draw_in_memory_is_an_address_on_the_gpu_of_the_run() {
        // SAFETY: nothing reads there.
        let at = |device, address| unsafe { DeviceDraw::new(device, address) };
        let gpu = Device::Cuda(1);
        for address in [0, 4, 0x41] {
            let refused = at(gpu, address).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("dropout_draw = {address:#x}; allowed: ")), "{refused}");
        }
        let seed = DropoutSeed::in_memory(at(gpu, 64).unwrap());
        assert_eq!(seed.check(3, gpu), Ok(()));
        assert!(matches!(
            seed.after(u32::MAX as usize).check(3, gpu),
            Err(Error::Option { option: "first_batch", .. })
        ));
        for device in [Device::Cuda(0), Device::Cpu] {
            let refused = Error::DeviceMismatch { tensor: "dropout_draw", expected: device, got: gpu };
            assert_eq!(seed.check(3, device), Err(refused));
        }
        let of_host = DropoutSeed::in_memory(at(Device::Cpu, 64).unwrap());
        assert!(matches!(of_host.check(3, Device::Cpu), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn a_block_is_a_function_of_every_number_that_names_it() {
        let plain = DropoutSeed { first_batch: 2, ..DropoutSeed::new(7, 3) };
        let block = plain.of_head(1, 4).block(6, 9);
        let others = [
            DropoutSeed { seed: 8, ..plain }.of_head(1, 4).block(6, 9),
            DropoutSeed { seed: 7 + (1 << 40), ..plain }.of_head(1, 4).block(6, 9),
            DropoutSeed { offset: 4, ..plain }.of_head(1, 4).block(6, 9),
            DropoutSeed { offset: 3 + (1 << 40), ..plain }.of_head(1, 4).block(6, 9),
            plain.of_head(2, 4).block(6, 9),
            plain.of_head(1, 5).block(6, 9),
            plain.of_head(1, 4).block(7, 9),
            plain.of_head(1, 4).block(6, 10),
        ];
        for other in others {
            assert_ne!(other, block);
        }
        // A sequence of a ragged batch is its own batch entry.
        assert_eq!(plain.after(1).of_head(0, 4).block(6, 9), block);
        // By hand.
        let [a, b, c, d] = philox([3, 0, 3, 4], [7, 0]);
        assert_eq!(block, philox([c, 9, d, 6], [a, b]));
    }

    #[test]
    fn a_threshold_is_a_probability_in_units_of_one_word() {
        let of = |p| Dropout::new(p).unwrap().unwrap();
        assert_eq!(of(0.5).last_dropped(), u32::MAX / 2);
        assert_eq!(of(0.25).last_dropped(), (1 << 30) - 1);
        assert_eq!(of(f64::MIN_POSITIVE).last_dropped(), 0);
        assert_eq!(of(0.1).last_dropped(), 429_496_729);
        assert_eq!((of(1.0).last_dropped(), of(1.0).scale()), (u32::MAX, 0.0));
        assert_eq!(of(1.0 - f64::EPSILON).scale(), 0.0, "every word is dropped");
        assert_eq!((of(0.5).scale(), of(0.75).scale()), (2.0, 4.0));
        assert_eq!([0.0, -0.0].map(|p| Dropout::new(p).unwrap()), [None; 2]);
        for p in [-1e-300, 1.0 + f64::EPSILON, f64::NAN, f64::INFINITY] {
            assert!(matches!(Dropout::new(p), Err(Error::Option { option: "dropout_p", .. })), "{p}");
        }
    }

    #[test]
    fn the_dropped_part_is_p_far_beyond_eight_bits() {
        // 2^22 words: the standard deviation of the part is 2^-12 · sqrt(p · (1 − p)) / 2.
        let draw = DropoutSeed::new(0x1234_5678_9abc_def0, 11);
        for p in [0.001, 0.1, 0.1 + 1.0 / 512.0, 0.5, 0.9] {
            let dropout = Dropout::new(p).unwrap().unwrap();
            let (heads, rows, groups) = (4, 256, 1024);
            let blocks = (0..heads).flat_map(|head| {
                let head = draw.of_head(head / 2, head % 2);
                (0..rows * groups).map(move |n| head.block(n / groups, n % groups))
            });
            let dropped: usize =
                blocks.map(|block| block.iter().filter(|&&word| word <= dropout.last_dropped()).count()).sum();
            let n = (heads * rows * groups * 4) as f64;
            let deviation = (p * (1.0 - p) / n).sqrt();
            assert!((dropped as f64 / n - p).abs() < 4.0 * deviation, "{p}: {dropped} of {n}");
        }
    }

    #[test]
    fn neighbours_are_dropped_apart_from_one_another() {
        // With p = 1/2 any two places agree half of the time: along a row, down a column, from head to head, from draw to draw.
        let dropout = Dropout::new(0.5).unwrap().unwrap();
        let draw = DropoutSeed::new(5, 0);
        let head = |offset: u64, batch, head| DropoutSeed { offset, ..draw }.of_head(batch, head);
        let is_dropped = |head: DropoutHead, row, column| head.is_dropped(dropout, row, column);
        let here = head(0, 0, 0);
        type IsDropped<'a> = &'a dyn Fn(usize, usize) -> bool;
        let others: [(&str, IsDropped<'_>); 6] = [
            ("next column", &|row, column| is_dropped(here, row, column + 1)),
            ("eight columns on", &|row, column| is_dropped(here, row, column + 8)),
            ("next row", &|row, column| is_dropped(here, row + 1, column)),
            ("next head", &|row, column| is_dropped(head(0, 0, 1), row, column)),
            ("next batch", &|row, column| is_dropped(head(0, 1, 0), row, column)),
            ("next draw", &|row, column| is_dropped(head(1, 0, 0), row, column)),
        ];
        let n = 128;
        for (name, other) in others {
            let places = (0..n * n).map(|at| (at / n, at % n));
            let agree = places.filter(|&(row, column)| is_dropped(here, row, column) == other(row, column)).count();
            let off = (agree as f64 - (n * n) as f64 / 2.0) / (n as f64 / 2.0);
            assert!(off.abs() < 4.0, "{name}: {off} standard deviations");
        }
    }
}
