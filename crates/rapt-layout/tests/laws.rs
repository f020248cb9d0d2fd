//! The laws of the algebra: on all small layouts, and on drawn ones.
#![allow(missing_docs)]

use proptest::prelude::*;
use rapt_layout::{Arrangement, ComposedLayout, Coord, Error, IntTuple, Layout, Swizzle, Tiler};

/// Shapes of up to three modes with a product of at most `most`, strides out of `strides`.
fn small(most: i64, strides: &[i64]) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for s0 in 1..=most {
        for d0 in strides {
            layouts.push(Layout::new(s0, *d0).unwrap());
            for s1 in (1..=most).filter(|s1| s0 * s1 <= most) {
                for d1 in strides {
                    layouts.push(Layout::new([s0, s1], [*d0, *d1]).unwrap());
                    for s2 in (2..=most).filter(|s2| s0 * s1 * s2 <= most) {
                        for d2 in strides {
                            let shape = IntTuple::from(vec![s0.into(), IntTuple::from([s1, s2])]);
                            let stride = IntTuple::from(vec![(*d0).into(), IntTuple::from([*d1, *d2])]);
                            layouts.push(Layout::new(shape, stride).unwrap());
                        }
                    }
                }
            }
        }
    }
    layouts
}

fn check_composition(a: &Layout, b: &Layout) -> bool {
    let Ok(r) = a.compose(b) else { return false };
    assert_eq!(r.size(), b.size(), "{a} o {b} = {r}");
    for i in 0..b.size() {
        let at = b.at(i).unwrap();
        if at < a.size() {
            assert_eq!(r.at(i).unwrap(), a.at(at).unwrap(), "{a} o {b} = {r} at {i}");
        }
    }
    // Every coordinate of B is one of R.
    for i in 0..b.size() {
        assert_eq!(r.at_coord(&b.coord_of(i).unwrap()).unwrap(), r.at(i).unwrap());
    }
    true
}

fn check_complement(a: &Layout, target: i64) -> bool {
    let Ok(c) = a.complement(target) else { return false };
    let mut sums = Vec::new();
    let moving = a.filter();
    for x in moving.offsets().unwrap() {
        sums.extend(c.offsets().unwrap().iter().map(|y| x + y));
    }
    sums.sort_unstable();
    let count = i64::try_from(sums.len()).unwrap();
    assert!(sums.iter().enumerate().all(|(at, sum)| at as i64 == *sum), "{a} and {c} cover 0..{count} once");
    assert!(count >= target, "{a} and {c} cover {target}");
    true
}

fn check_inverses(a: &Layout) {
    let right = a.right_inverse().unwrap();
    for i in 0..right.size() {
        assert_eq!(a.at(right.at(i).unwrap()).unwrap(), i, "right inverse {right} of {a}");
    }
    if let Ok(left) = a.left_inverse() {
        for i in 0..a.size() {
            assert_eq!(left.at(a.at(i).unwrap()).unwrap(), i, "left inverse {left} of {a}");
        }
    }
    if a.is_bijective().unwrap() {
        assert_eq!(right.size(), a.size(), "{a} is onto, so its right inverse is whole");
        assert!(a.left_inverse().is_ok(), "{a}");
    }
}

#[test]
fn composition_is_composition_on_all_small_layouts() {
    let layouts = small(4, &[0, 1, 2, 4]);
    let mut admitted = 0;
    for a in &layouts {
        for b in &layouts {
            admitted += usize::from(check_composition(a, b));
        }
    }
    assert!(admitted * 3 > layouts.len() * layouts.len(), "{admitted} of {}²", layouts.len());
}

#[test]
fn complements_and_inverses_on_all_small_layouts() {
    let layouts = small(8, &[0, 1, 2, 3, 4, 6]);
    let mut complemented = 0;
    for a in &layouts {
        for target in [1, 5, 12, 24] {
            complemented += usize::from(check_complement(a, target));
        }
        check_inverses(a);
        let flat = a.coalesce();
        assert!(flat.depth() <= 1 && flat.size() == a.size());
        assert_eq!(flat.offsets().unwrap(), a.offsets().unwrap(), "{a}");
        assert_eq!(a.flatten().offsets().unwrap(), a.offsets().unwrap());
        assert_eq!(a.to_string().parse::<Layout>().unwrap(), *a);
        assert_eq!(a.cosize(), a.offsets().unwrap().into_iter().max().unwrap() + 1);
    }
    assert!(complemented > layouts.len());
}

#[test]
fn divide_and_product_on_all_small_layouts() {
    let tilers = small(6, &[1, 2, 3, 4]);
    for size in [6, 8, 12, 24] {
        let a = Layout::new(size, 1).unwrap();
        for b in &tilers {
            let Ok(divided) = a.logical_divide(&b.clone().into()) else { continue };
            // The tile is the tiler; tile and rest together are a permutation of 0 … n − 1 with n ≥ size.
            assert_eq!(divided.mode(0).unwrap().offsets().unwrap(), b.offsets().unwrap());
            let mut all = divided.offsets().unwrap();
            all.sort_unstable();
            assert!(all.iter().enumerate().all(|(at, x)| at as i64 == *x) && divided.size() >= size, "{a} / {b}");
        }
    }
    let blocks = small(6, &[1, 2, 3, 6]);
    let mut products = 0;
    for block in &blocks {
        for copies in blocks.iter().filter(|copies| copies.is_injective().unwrap()) {
            let Ok(product) = block.logical_product(&copies.clone().into()) else { continue };
            products += 1;
            assert_eq!(product.mode(0).unwrap(), *block);
            assert!(product.is_injective().unwrap(), "{block} x {copies} = {product}: copies do not overlap");
            assert_eq!(product.mode(1).unwrap().size(), copies.size());
        }
    }
    assert!(products > 1000, "{products}");
}

fn extents() -> impl Strategy<Value = i64> {
    prop_oneof![Just(1), Just(2), Just(3), Just(4), Just(6), Just(8), Just(16)]
}

/// A compact layout of a random shape whose modes were shuffled: bijective.
fn compact() -> impl Strategy<Value = Layout> {
    prop::collection::vec(extents(), 1..5)
        .prop_flat_map(|shape| (Just(shape.clone()), Just((0..shape.len()).collect::<Vec<_>>()).prop_shuffle()))
        .prop_map(|(shape, order)| {
            let mut strides = vec![0; shape.len()];
            let mut next = 1;
            for at in order {
                strides[at] = next;
                next *= shape[at];
            }
            let tuple = |leaves: &[i64]| IntTuple::Tuple(leaves.iter().map(|n| (*n).into()).collect());
            Layout::new(tuple(&shape), tuple(&strides)).unwrap()
        })
}

fn any_layout() -> impl Strategy<Value = Layout> {
    prop::collection::vec((extents(), 0i64..200), 1..5).prop_map(|modes| {
        let (shape, stride): (Vec<IntTuple>, Vec<IntTuple>) =
            modes.into_iter().map(|(s, d)| (s.into(), d.into())).unzip();
        Layout::new(shape, stride).unwrap()
    })
}

proptest! {
    #[test]
    fn drawn_layouts_obey(a in any_layout(), b in any_layout(), c in compact(), target in 1i64..5000) {
        check_composition(&a, &b);
        check_composition(&a, &c);
        check_complement(&a, target);
        check_complement(&c, target);
        check_inverses(&a);
        check_inverses(&c);
        prop_assert_eq!(a.coalesce().offsets().unwrap(), a.offsets().unwrap());
    }

    #[test]
    fn composition_is_associative(a in any_layout(), b in compact(), c in compact()) {
        if let (Ok(ab), Ok(bc)) = (a.compose(&b), b.compose(&c))
            && let (Ok(left), Ok(right)) = (ab.compose(&c), a.compose(&bc))
            && (0..c.size()).all(|i| c.at(i).unwrap() < b.size() && bc.at(i).unwrap() < a.size())
        {
            prop_assert_eq!(left.offsets().unwrap(), right.offsets().unwrap());
        }
    }

    #[test]
    fn tuple_tilers_divide_each_mode(m in 1i64..5, n in 1i64..5, tile_m in 1i64..5, tile_n in 1i64..5) {
        let layout = Layout::row_major([m * tile_m, n * tile_n]).unwrap();
        let tiler: Tiler = format!("<{tile_m},{tile_n}>").parse().unwrap();
        let zipped = layout.divide(&tiler, Arrangement::Zipped).unwrap();
        for (i, j) in (0..m * tile_m).flat_map(|i| (0..n * tile_n).map(move |j| (i, j))) {
            let coord = IntTuple::from([IntTuple::from([i % tile_m, j % tile_n]), [i / tile_m, j / tile_n].into()]);
            prop_assert_eq!(zipped.at_coord(&coord).unwrap(), layout.at_coord(&[i, j].into()).unwrap());
        }
        let product = Layout::row_major([tile_m, tile_n]).unwrap().blocked_product(&Layout::row_major([m, n]).unwrap());
        let mut all = product.unwrap().offsets().unwrap();
        all.sort_unstable();
        prop_assert!(all.iter().enumerate().all(|(at, x)| at as i64 == *x));
    }

    #[test]
    fn recasting_there_and_back(a in any_layout(), n in 1i64..5) {
        let down = a.downcast(n).unwrap();
        prop_assert_eq!(down.upcast(n).unwrap().offsets().unwrap(), a.offsets().unwrap());
        if let Ok(up) = a.upcast(n) {
            // Every wide element is one that a narrow one lay in.
            let narrow: std::collections::BTreeSet<i64> = a.offsets().unwrap().iter().map(|x| x.div_euclid(n)).collect();
            prop_assert!(up.offsets().unwrap().iter().all(|x| narrow.contains(x)));
        }
    }

    #[test]
    fn slices_are_the_layout_with_a_part_fixed(a in any_layout(), pick in 0i64..1000) {
        for at in 0..a.rank() {
            let extent = a.mode(at).unwrap().size();
            let fixed = pick % extent;
            let coords = |rest: Coord| Coord::Tuple((0..a.rank()).map(|k| if k == at { Coord::At(fixed) } else { rest.clone() }).collect());
            let (kept, offset) = a.slice(&coords(Coord::All)).unwrap();
            prop_assert_eq!(offset, a.mode(at).unwrap().at(fixed).unwrap());
            prop_assert_eq!(kept.size() * extent, a.size());
        }
    }

    #[test]
    fn no_text_panics(text in "[0-9(),:_o<>S w-]{0,40}") {
        let _ = text.parse::<Layout>();
        let _ = text.parse::<Tiler>();
        let _ = text.parse::<Coord>();
        let _ = text.parse::<Swizzle>();
        if let Ok(layout) = text.parse::<ComposedLayout>() {
            prop_assert_eq!(layout.to_string().parse::<ComposedLayout>(), Ok(layout));
        }
    }

    #[test]
    fn large_numbers_are_refused_and_do_not_wrap(
        s in prop::collection::vec(1i64..i64::MAX, 1..4), d in prop::collection::vec(any::<i64>(), 4), n in any::<i64>()
    ) {
        let d: Vec<IntTuple> = d.into_iter().take(s.len()).map(IntTuple::Int).collect();
        let s: Vec<IntTuple> = s.into_iter().map(IntTuple::Int).collect();
        match Layout::new(s.clone(), d) {
            Ok(layout) => {
                let tile: Result<Layout, Error> = Layout::new(3, 7);
                let tiler = Tiler::Layout(tile.unwrap());
                let _ = (layout.cosize(), layout.range(), layout.at(n), layout.coord_of(n), layout.complement(n));
                let _ = (layout.right_inverse(), layout.left_inverse(), layout.upcast(n), layout.downcast(n));
                let _ = (layout.logical_divide(&tiler), layout.logical_product(&tiler), layout.compose(&layout));
                let _ = (layout.offsets(), layout.coalesce(), layout.filter(), layout.recast(n, 8));
            }
            Err(error) => {
                let is_known = matches!(error, Error::Overflow { .. });
                prop_assert!(is_known, "{}", error);
            }
        }
        let _ = Layout::column_major(s.clone());
        let _ = Layout::row_major(s);
    }
}
