//! What is asked for ahead of being read: each line of each row once, in shares. Compiled by itself, with vectors that write down what they are asked for.

#[allow(dead_code)]
#[path = "../src/kernels/next_rows.rs"]
mod next_rows;

mod simd {
    use std::cell::RefCell;

    thread_local!(static ASKED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) });

    pub(crate) trait Simd {
        const PREFETCHES: bool;
        unsafe fn prefetch(ptr: *const u8);
    }

    pub(crate) struct Recorded;

    impl Simd for Recorded {
        const PREFETCHES: bool = true;
        unsafe fn prefetch(ptr: *const u8) {
            ASKED.with_borrow_mut(|asked| asked.push(ptr.addr()));
        }
    }

    /// What was asked for since the last call.
    pub(crate) fn asked() -> Vec<usize> {
        ASKED.take()
    }
}

mod problem {
    macro_rules! tensor {
        ($name:ident, $ptr:ty $(, $pages:ident)?) => {
            pub(crate) struct $name<const N: usize> {
                pub(crate) ptr: $ptr,
                pub(crate) size: isize,
                pub(crate) strides: [isize; N],
                $(pub(crate) $pages: Option<()>,)?
            }
            impl<const N: usize> $name<N> {
                pub(crate) fn at(&self, index: [usize; N]) -> $ptr {
                    let steps = self.strides.iter().zip(index).map(|(stride, i)| stride * i as isize);
                    self.ptr.wrapping_offset(steps.sum::<isize>() * self.size)
                }
            }
        };
    }
    tensor!(Input, *const u8, pages);
    tensor!(Output, *mut u8);
}

use next_rows::NextRows;
use problem::{Input, Output};

const LINE: usize = 64;

/// The lines of `rows` rows of `bytes` bytes, `step` bytes apart.
fn lines(first: usize, step: isize, rows: usize, bytes: usize) -> Vec<usize> {
    let row = |r: usize| {
        let from = first.wrapping_add_signed(step * r as isize);
        (from / LINE * LINE..from + bytes).step_by(LINE)
    };
    (0..rows).flat_map(row).collect()
}

/// Everything that is asked for in `asks` calls, and the most of one.
fn take(mut next: NextRows, asks: usize) -> (Vec<usize>, usize) {
    next.spread(asks);
    simd::asked();
    let (mut all, mut most) = (Vec::new(), 0);
    for _ in 0..asks {
        // SAFETY: nothing is read.
        unsafe { next.ask::<simd::Recorded>() };
        let asked = simd::asked();
        most = most.max(asked.len());
        all.extend(asked);
    }
    (all, most)
}

#[test]
fn each_line_of_each_row_is_asked_for_once_and_in_shares() {
    let (at, size, dim) = (1 << 20, 4, 64);
    // Rows apart, rows that touch, backwards, one after one.
    for (row, rows) in [(768, 5), (dim as isize, 7), (-100, 6), (0, 3)] {
        let input =
            Input { ptr: std::ptr::without_provenance(at), size, strides: [1 << 16, 1 << 14, row, 1], pages: None };
        for asks in [1, 4, 100] {
            let mut next = NextRows::new();
            next.add(&input, [1, 2, 3, 0], rows, dim);
            let first = at.wrapping_add_signed(4 * ((1 << 16) + 2 * (1 << 14) + 3 * row));
            let (asked, most) = take(next, asks);
            let expected = lines(first, 4 * row, rows, 4 * dim);
            if row == dim as isize {
                let (from, to) = (expected[0], *expected.last().unwrap());
                assert_eq!(asked, (from..=to).step_by(LINE).collect::<Vec<_>>(), "row {row}, {asks} asks");
            } else {
                assert_eq!(asked, expected, "row {row}, {asks} asks");
            }
            assert!(most <= (expected.len() + rows).div_ceil(asks), "row {row}, {asks} asks: {most} at once");
        }
    }
}

#[test]
fn what_has_no_rows_of_bytes_side_by_side_is_not_asked_for() {
    let input = |element, pages| Input {
        ptr: std::ptr::without_provenance(4096),
        size: 2,
        strides: [0, 0, 64, element],
        pages,
    };
    for (input, rows, dim) in
        [(input(2, None), 4, 8), (input(1, Some(())), 4, 8), (input(1, None), 0, 8), (input(1, None), 4, 0)]
    {
        let mut next = NextRows::new();
        next.add(&input, [0; 4], rows, dim);
        assert_eq!(take(next, 3).0, []);
    }
    assert_eq!(take(NextRows::new(), 3).0, []);
}

#[test]
fn runs_follow_one_another_and_those_beyond_the_room_are_left_out() {
    let mut next = NextRows::new();
    let mut expected = Vec::new();
    for n in 0..40 {
        let at = 4096 * (n + 1);
        let out = Output { ptr: std::ptr::without_provenance_mut(at), size: 1, strides: [0, 0, 128, 1] };
        next.add_output(&out, [0; 4], 2, 64);
        if n < 12 {
            expected.extend([at, at + 128]);
        }
    }
    assert_eq!(take(next, 5).0, expected);
}
