//! The order that `std::sort` of libstdc++ gives, with which PyTorch sorts for a mode: equal elements, and those that compare with
//! nothing as NaN does, end up where its steps leave them.
//!
//! ```text
//! while more than 16 elements   the median of three to the front; what is less before, what is greater behind it
//! then                          each element moves to the left while it is less than its neighbour
//! ```
//! What has been parted too often is merged here, and sorted by a heap there: the places of equals may differ then.

/// What a part of so many elements is left to the last pass.
const SMALL: usize = 16;

/// Sorts by `less`, which need not be an order.
pub(super) fn std_sort(x: &mut [usize], less: &dyn Fn(usize, usize) -> bool) {
    part_by_part(x, 2 * x.len().checked_ilog2().unwrap_or(0), less);
    let first = x.len().min(SMALL);
    for i in 1..first {
        if less(x[i], x[0]) {
            x[..=i].rotate_right(1);
        } else {
            to_the_left(x, i, less);
        }
    }
    for i in first..x.len() {
        to_the_left(x, i, less);
    }
}

fn to_the_left(x: &mut [usize], mut i: usize, less: &dyn Fn(usize, usize) -> bool) {
    while i > 0 && less(x[i], x[i - 1]) {
        x.swap(i, i - 1);
        i -= 1;
    }
}

fn part_by_part(mut x: &mut [usize], mut depth: u32, less: &dyn Fn(usize, usize) -> bool) {
    while x.len() > SMALL {
        if depth == 0 {
            // A stable merge that asks for no order.
            return merged(x, less);
        }
        depth -= 1;
        let cut = parted(x, less);
        let (before, behind) = x.split_at_mut(cut);
        part_by_part(behind, depth, less);
        x = before;
    }
}

/// Brings the median of three to the front, and gives where the greater elements begin.
fn parted(x: &mut [usize], less: &dyn Fn(usize, usize) -> bool) -> usize {
    let [a, b, c] = [1, x.len() / 2, x.len() - 1];
    let is_less = |a: usize, b: usize| less(x[a], x[b]);
    let median = if is_less(a, b) {
        if is_less(b, c) {
            b
        } else if is_less(a, c) {
            c
        } else {
            a
        }
    } else if is_less(a, c) {
        a
    } else if is_less(b, c) {
        c
    } else {
        b
    };
    x.swap(0, median);
    let (mut low, mut high) = (1, x.len());
    loop {
        while low < x.len() && less(x[low], x[0]) {
            low += 1;
        }
        high -= 1;
        while high > 0 && less(x[0], x[high]) {
            high -= 1;
        }
        if low >= high {
            return low;
        }
        x.swap(low, high);
        low += 1;
    }
}

fn merged(x: &mut [usize], less: &dyn Fn(usize, usize) -> bool) {
    if x.len() < 2 {
        return;
    }
    let (left, right) = x.split_at_mut(x.len() / 2);
    merged(left, less);
    merged(right, less);
    let (left, right) = (left.to_vec(), right.to_vec());
    let (mut l, mut r) = (left.into_iter().peekable(), right.into_iter().peekable());
    for to in x {
        let from_right = match (l.peek(), r.peek()) {
            (Some(&a), Some(&b)) => less(b, a),
            (left, _) => left.is_none(),
        };
        *to = if from_right { r.next() } else { l.next() }.unwrap_or(*to);
    }
}
