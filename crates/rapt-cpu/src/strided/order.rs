//! `sort`, `argsort` and `topk` along a dimension.
//!
//! Of each lane the elements' ranks and numbers are sorted as one integer: the order is that of a stable sort, and needs no
//! memory beyond the integers. NaN is the greatest; of equal elements the first stays first, ascending and descending alike.

use rapt_core::DType;

use super::element::{Call, Element, Entry, Typed, plain_entry};
use super::{Dim, Dims, Form, Kernel};

/// The order of elements along a dimension. Operands: x, the elements in order, their places (int64), the latter two where they
/// are wanted.
#[derive(Clone, Debug)]
pub struct Order {
    lanes: Dims<3>,
    along: Dim<3>,
    keep: usize,
    is_descending: bool,
    has_values: bool,
    has_places: bool,
    is_short: bool,
    run: Entry<Order>,
}

impl Order {
    /// The order of `x` along `dim`, of which the first `keep` are wanted: the forms of the elements in order, and of their
    /// places. `None` for dtypes that are not served, and where `keep` is more than there are.
    #[must_use]
    pub fn new(
        x: &Form,
        dim: usize,
        keep: usize,
        is_descending: bool,
        values: Option<&Form>,
        places: Option<&Form>,
    ) -> Option<Order> {
        let of = |form: Option<&Form>, d: usize| form.map_or(0, |form| form.strides[d]);
        let each = |d: usize| Dim { size: x.shape[d], strides: [x.strides[d], of(values, d), of(places, d)] };
        let lanes = Dims::new((0..x.shape.len()).filter(|&d| d != dim).map(each));
        let along = if x.shape.is_empty() { Dim { size: 1, strides: [0; 3] } } else { each(dim) };
        let is_short = x.dtype.bits() <= 32 && u32::try_from(along.size).is_ok();
        let run = plain_entry::<Run>(x.dtype)?;
        let (has_values, has_places) = (values.is_some(), places.is_some());
        (keep <= along.size).then_some(Order {
            lanes,
            along,
            keep,
            is_descending,
            has_values,
            has_places,
            is_short,
            run,
        })
    }
}

impl Kernel for Order {
    fn name(&self) -> &'static str {
        if self.keep < self.along.size { "top" } else { "sort" }
    }

    fn units(&self) -> usize {
        self.lanes.count()
    }

    fn unit_work(&self) -> usize {
        self.along.size.saturating_mul(16)
    }

    fn scratch_bytes(&self) -> usize {
        (self.along.size * if self.is_short { 8 } else { 16 }).next_multiple_of(64)
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        debug_assert_eq!(DType::I64.bits(), 64);
        // SAFETY: promised by the caller.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

/// An integer of a rank and a number: the rank in the upper half.
trait Key: Copy + Ord {
    fn new(rank: u64, number: usize, is_descending: bool) -> Self;
    fn number(self) -> usize;
}

impl Key for u64 {
    fn new(rank: u64, number: usize, is_descending: bool) -> u64 {
        let rank = if is_descending { !rank & 0xFFFF_FFFF } else { rank };
        (rank << 32) | number as u64
    }
    fn number(self) -> usize {
        (self & 0xFFFF_FFFF) as usize
    }
}

impl Key for u128 {
    fn new(rank: u64, number: usize, is_descending: bool) -> u128 {
        let rank = if is_descending { !rank } else { rank };
        (u128::from(rank) << 64) | number as u128
    }
    fn number(self) -> usize {
        (self & u128::from(u64::MAX)) as usize
    }
}

struct Run;

impl Typed for Run {
    type Kernel = Order;
    unsafe fn run<T: Element>(kernel: &Order, call: &Call<'_>) {
        // SAFETY: promised by the caller.
        unsafe {
            if kernel.is_short {
                lanes::<T, u64>(kernel, call);
            } else {
                lanes::<T, u128>(kernel, call);
            }
        }
    }
}

unsafe fn lanes<T: Element, K: Key>(kernel: &Order, call: &Call<'_>) {
    let x = call.pointers[0].cast_const().cast::<T>();
    let last = call.pointers.last().copied().unwrap_or(std::ptr::null_mut());
    let (values, places) = (call.pointers[1].cast::<T>(), last.cast::<i64>());
    let Dim { size, strides: [step, value_step, place_step] } = kernel.along;
    for unit in call.units.clone() {
        let [from, to_value, to_place] = kernel.lanes.at(unit);
        // SAFETY: the caller vouches for every element, and for scratch memory of a key for each element of a lane.
        unsafe {
            let x = x.offset(from);
            let keys = call.scratch.cast::<K>();
            for i in 0..size {
                let rank = x.offset(i.cast_signed() * step).read().rank();
                keys.add(i).write(K::new(rank, i, kernel.is_descending));
            }
            let keys = std::slice::from_raw_parts_mut(keys, size);
            if 0 < kernel.keep && kernel.keep < size {
                keys.select_nth_unstable(kernel.keep - 1);
            }
            let keys = &mut keys[..kernel.keep];
            keys.sort_unstable();
            for (i, key) in keys.iter().enumerate() {
                let (i, number) = (i.cast_signed(), key.number());
                if kernel.has_values {
                    let value = x.offset(number.cast_signed() * step).read();
                    values.offset(to_value + i * value_step).write(value);
                }
                if kernel.has_places {
                    places.offset(to_place + i * place_step).write(number as i64);
                }
            }
        }
    }
}
