//! A cache that owns its pages: whatever was appended, forked, truncated and freed before, each sequence attends to its own keys with the bits
//! of whole tensors, and what is refused has changed nothing.

use std::collections::BTreeMap;

use half::{bf16, f16};
use rapt::quant::{QuantError, Quantized, Scheme, quantize, quantize_with_global};
use rapt::{
    CacheView, Causal, Compute, DType, Element, Engine, Error, ErrorKind, Format, Granularity, Kernel, KvCache,
    KvCacheForm, KvCacheQueries, Options, Qkv, Queue, ScaleLayout, SequenceId, Shape, TensorLayout, Tensors, View,
    ViewMut,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 20;
const DIM_V: usize = 12;
/// The factor of all keys, and of all values, of nvfp4.
const GLOBAL: f32 = 12.0;

/// A dtype of keys.
trait Real: Element + Default {
    fn of(x: f32) -> Self;
    fn bits(self) -> u32;
}

impl Real for f32 {
    fn of(x: f32) -> Self {
        x
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Real for bf16 {
    fn of(x: f32) -> Self {
        bf16::from_f32(x)
    }

    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Real for f16 {
    fn of(x: f32) -> Self {
        f16::from_f32(x)
    }

    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// Numbers that follow from a seed.
struct Rng(u32);

impl Rng {
    fn new(seed: u32) -> Rng {
        Rng(seed.wrapping_mul(2_654_435_761) | 1)
    }

    fn next(&mut self) -> u32 {
        // Xorshift (Marsaglia, 2003).
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 >> 8
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Numbers between −2 and 2.
    fn reals<T: Real>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::of(self.next() as f32 / (1 << 22) as f32 - 2.0)).collect()
    }
}

fn engine() -> Engine {
    Engine::new(Some(2)).unwrap()
}

fn scheme(format: Format, granularity: Option<Granularity>) -> Scheme {
    Scheme::new(format, granularity, ScaleLayout::Plain).unwrap()
}

fn view<'a, T: Element>(data: &'a [T], shape: &[usize]) -> View<'a> {
    View::contiguous("x", data, Shape::new(shape).unwrap()).unwrap()
}

fn bits<T: Real>(numbers: &[T]) -> Vec<u32> {
    numbers.iter().map(|x| x.bits()).collect()
}

/// The error of the vocabulary that was refused with.
fn core<T: std::fmt::Debug>(result: Result<T, QuantError>) -> Error {
    match result {
        Err(QuantError::Core(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// The keys and values of a sequence, `[length, heads, dim]`.
#[derive(Clone, Default)]
struct Model<T> {
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> Model<T> {
    fn length(&self) -> usize {
        self.k.len() / (KV_HEADS * DIM)
    }

    fn truncate(&mut self, length: usize) {
        self.k.truncate(length * KV_HEADS * DIM);
        self.v.truncate(length * KV_HEADS * DIM_V);
    }

    fn extend(&mut self, [k, v]: [&[T]; 2]) {
        self.k.extend_from_slice(k);
        self.v.extend_from_slice(v);
    }
}

/// A cache, and beside it what each of its sequences holds.
struct World<T> {
    cache: KvCache,
    model: BTreeMap<SequenceId, Model<T>>,
    rng: Rng,
}

/// What a page holds before it holds keys: NaN where the format has it, else numbers far from the others.
fn garbage<T: Real>(form: &KvCacheForm) -> T {
    let has_nan = [form.k_codes, form.v_codes].into_iter().flatten().all(|scheme| scheme.format().has_nan());
    T::of(if has_nan { f32::NAN } else { 3e4 })
}

impl<T: Real> World<T> {
    /// A cache whose pages have all held garbage.
    fn new(form: KvCacheForm, seed: u32) -> World<T> {
        let mut cache = KvCache::new(form).unwrap();
        let all = form.num_pages * form.page_size;
        let [k, v] = [DIM, DIM_V].map(|dim| vec![garbage::<T>(&form); all * KV_HEADS * dim]);
        let id = cache.new_sequence();
        cache.append(id, &view(&k, &[all, KV_HEADS, DIM]), &view(&v, &[all, KV_HEADS, DIM_V])).unwrap();
        assert_eq!(cache.free_pages(), 0);
        cache.free(id).unwrap();
        World { cache, model: BTreeMap::new(), rng: Rng::new(seed) }
    }

    fn any(&mut self) -> Option<SequenceId> {
        let n = self.rng.below(self.model.len().max(1));
        self.model.keys().nth(n).copied()
    }

    fn table(&self, ids: &[SequenceId]) -> Vec<Vec<i32>> {
        let table = self.cache.page_table(ids).unwrap();
        let entries = table.shape()[1];
        (0..ids.len()).map(|n| table.to_vec::<i32>().unwrap()[n * entries..][..entries].to_vec()).collect()
    }

    /// The pages of each sequence; each table is as long as its keys take, and padded with −1.
    fn pages(&self) -> BTreeMap<SequenceId, Vec<i32>> {
        let ids: Vec<SequenceId> = self.model.keys().copied().collect();
        let page_size = self.cache.form().page_size;
        let of = |(id, mut row): (SequenceId, Vec<i32>)| {
            let padding = row.split_off(self.model[&id].length().div_ceil(page_size));
            assert!(padding.iter().all(|&page| page == -1) && row.iter().all(|&page| page >= 0));
            (id, row)
        };
        ids.iter().copied().zip(self.table(&ids)).map(of).collect()
    }

    /// The pages that `new` keys of each of `ids` take, found from who has which page.
    fn needed(&self, ids: &[SequenceId], new: usize) -> usize {
        let (pages, page_size) = (self.pages(), self.cache.form().page_size);
        let mut needed = 0;
        let mut writers: BTreeMap<i32, usize> = BTreeMap::new();
        for id in ids {
            let length = self.model[id].length();
            needed += (length + new).div_ceil(page_size) - pages[id].len();
            if new > 0 && !length.is_multiple_of(page_size) {
                *writers.entry(*pages[id].last().unwrap()).or_default() += 1;
            }
        }
        for (page, writers) in writers {
            let holders = pages.values().filter(|pages| pages.contains(&page)).count();
            needed += if writers < holders { writers } else { holders - 1 };
        }
        needed
    }

    /// Appends to one sequence, or to several: exactly where the pages are there.
    fn append(&mut self, ids: &[SequenceId]) {
        let new = self.rng.below(7);
        let (needed, free, before) = (self.needed(ids, new), self.cache.free_pages(), self.pages());
        let [k, v] = [DIM, DIM_V].map(|dim| self.rng.reals::<T>(ids.len() * new * KV_HEADS * dim));
        let done = if let [id] = ids {
            self.cache.append(*id, &view(&k, &[new, KV_HEADS, DIM]), &view(&v, &[new, KV_HEADS, DIM_V]))
        } else {
            let batch = ids.len();
            let (k, v) = (view(&k, &[batch, new, KV_HEADS, DIM]), view(&v, &[batch, new, KV_HEADS, DIM_V]));
            self.cache.append_batch(ids, &k, &v)
        };
        if needed > free {
            assert_eq!(core(done), Error::OutOfPages { needed, free });
            assert_eq!((self.cache.free_pages(), self.pages()), (free, before), "nothing is changed");
            return;
        }
        done.unwrap();
        assert_eq!(self.cache.free_pages(), free - needed);
        for (n, id) in ids.iter().enumerate() {
            let part = |of: &'_ [T], len: usize| of[n * new * len..][..new * len].to_vec();
            let (k, v) = (part(&k, KV_HEADS * DIM), part(&v, KV_HEADS * DIM_V));
            self.model.get_mut(id).unwrap().extend([&k, &v]);
        }
    }

    /// Lengths, and that each page is free or somebody's.
    fn check(&self) {
        for (id, model) in &self.model {
            assert_eq!(self.cache.length(*id), Ok(model.length()));
        }
        let mut held: Vec<i32> = self.pages().into_values().flatten().collect();
        held.sort_unstable();
        held.dedup();
        assert_eq!(held.len() + self.cache.free_pages(), self.cache.form().num_pages);
        assert_eq!(self.cache.num_sequences(), self.model.len());
    }

    /// One step of a random program.
    fn step(&mut self, engine: &Engine, n: usize) {
        let id = self.any();
        match (self.rng.below(16), id) {
            (0 | 1, _) | (_, None) if self.model.len() < 8 => {
                let id = self.cache.new_sequence();
                assert!(self.model.insert(id, Model::default()).is_none());
            }
            (2 | 3, Some(id)) if self.model.len() < 8 => {
                let fork = self.cache.fork(id).unwrap();
                assert!(self.model.insert(fork, self.model[&id].clone()).is_none());
            }
            (4 | 5, Some(id)) => {
                let length = self.rng.below(self.model[&id].length() + 1);
                self.cache.truncate(id, length).unwrap();
                self.model.get_mut(&id).unwrap().truncate(length);
            }
            (6, Some(id)) => {
                self.cache.free(id).unwrap();
                self.model.remove(&id);
                let unknown = Error::UnknownSequence { sequence: id.number() };
                assert_eq!(self.cache.length(id), Err(unknown.clone()));
                assert_eq!(self.cache.free(id), Err(unknown));
            }
            (7, Some(_)) => {
                let ids: Vec<_> = self.model.keys().copied().filter(|_| self.rng.below(2) == 0).collect();
                self.append(&ids);
            }
            (8..=12, Some(id)) => self.append(&[id]),
            (_, Some(_)) => self.attend(engine, n),
            (_, None) => {}
        }
        self.check();
    }

    /// Attention of some of the sequences against whole tensors.
    fn attend(&mut self, engine: &Engine, n: usize) {
        let ids: Vec<SequenceId> = (0..1 + self.rng.below(4)).filter_map(|_| self.any()).collect();
        let (batch, q_len) = (ids.len(), [1, 1, 3, 10][n % 4]);
        let causal = (!n.is_multiple_of(3)).then_some(Causal::BottomRight);
        let options = Options { causal, layout: TensorLayout::Bshd, ..Options::default() };
        let q = self.rng.reals::<T>(batch * q_len * HEADS * DIM);
        let sinks = n.is_multiple_of(5).then(|| self.rng.reals::<T>(HEADS));
        let (mut out, mut lse) =
            (vec![T::of(f32::NAN); batch * q_len * HEADS * DIM_V], vec![f32::NAN; batch * q_len * HEADS]);
        let queries = KvCacheQueries {
            sinks: sinks.as_deref().map(|sinks| view(sinks, &[HEADS])),
            lse: Some(ViewMut::contiguous("lse", &mut lse, [batch, HEADS, q_len].into()).unwrap()),
            ..KvCacheQueries::new(
                view(&q, &[batch, q_len, HEADS, DIM]),
                &ids,
                ViewMut::contiguous("out", &mut out, [batch, q_len, HEADS, DIM_V].into()).unwrap(),
            )
        };
        self.cache.attention(engine, queries, &options, &Queue::Host(engine.executor())).unwrap();
        for (n, id) in ids.iter().enumerate() {
            let q = &q[n * q_len * HEADS * DIM..][..q_len * HEADS * DIM];
            let (one, one_lse) = self.alone(engine, [q, sinks.as_deref().unwrap_or(&[])], *id, &options);
            assert_eq!(bits(&out[n * one.len()..][..one.len()]), bits(&one));
            assert_eq!(bits(&lse[n * one_lse.len()..][..one_lse.len()]), bits(&one_lse));
        }
    }

    /// Attention, with sinks where there are some, to the keys of the model in one tensor, or to codes made of them at once, which those in the cache are: out and lse.
    fn alone(&self, engine: &Engine, [q, sinks]: [&[T]; 2], id: SequenceId, options: &Options) -> (Vec<T>, Vec<f32>) {
        let (model, form) = (&self.model[&id], self.cache.form());
        let (rows, keys) = (q.len() / (HEADS * DIM), model.length());
        let (k, v) = (view(&model.k, &[1, keys, KV_HEADS, DIM]), view(&model.v, &[1, keys, KV_HEADS, DIM_V]));
        let quantized = |scheme: Option<Scheme>, x: &View<'_>| {
            scheme.map(|scheme| match scheme.format().has_global_scale() {
                true => quantize_with_global(x, scheme, GLOBAL).unwrap(),
                false => quantize(x, scheme, None).unwrap(),
            })
        };
        let (of_k, of_v) = (quantized(form.k_codes, &k), quantized(form.v_codes, &v));
        self.compare_codes(id, self.cache.k_pages().unwrap(), self.cache.k_codes().unwrap(), of_k.as_ref());
        self.compare_codes(id, self.cache.v_pages().unwrap(), self.cache.v_codes().unwrap(), of_v.as_ref());
        let (mut out, mut lse) = (vec![T::of(f32::NAN); rows * HEADS * DIM_V], vec![f32::NAN; rows * HEADS]);
        let [of_k, of_v] = [&of_k, &of_v].map(|it| it.as_ref().map(|it| it.view().unwrap()));
        let codes = Qkv { q: None, k: of_k.map(|it| Box::new(it.codes())), v: of_v.map(|it| Box::new(it.codes())) };
        let (k, v) = (of_k.map_or(k, |it| it.tensor()), of_v.map_or(v, |it| it.tensor()));
        let q = view(q, &[1, rows, HEADS, DIM]);
        let tensors = Tensors {
            codes,
            sinks: (!sinks.is_empty()).then(|| view(sinks, &[HEADS])),
            lse: Some(ViewMut::contiguous("lse", &mut lse, [1, HEADS, rows].into()).unwrap()),
            ..Tensors::new(q, k, v, ViewMut::contiguous("out", &mut out, [1, rows, HEADS, DIM_V].into()).unwrap())
        };
        engine.attention_into(tensors, options).unwrap();
        (out, lse)
    }

    /// Codes and scales in the pages of a sequence are those of the whole.
    fn compare_codes(
        &self,
        id: SequenceId,
        pages: View<'_>,
        codes: Option<rapt::CacheCodes<'_>>,
        whole: Option<&Quantized>,
    ) {
        let (Some(codes), Some(whole)) = (codes, whole) else {
            assert!(codes_are_absent(self.cache.form(), pages.dtype()));
            return;
        };
        let (keys, page_size) = (self.model[&id].length(), self.cache.form().page_size);
        let table = self.table(&[id]).remove(0);
        let gather = |view: &View<'_>| -> Vec<u8> {
            (0..keys)
                .flat_map(|j| {
                    bytes(&view.index(0, table[j / page_size] as usize).narrow(0, &(j % page_size..j % page_size + 1)))
                })
                .collect()
        };
        let parts = whole.parts().unwrap();
        assert_eq!(gather(&pages), bytes(&parts.codes));
        let CacheView::Read(descale) = &codes.descale else { panic!("to be read") };
        assert_eq!(gather(descale), bytes(&parts.scale.unwrap()));
        assert_eq!(codes.zero_point.is_some(), parts.zero_point.is_some());
        if let (Some(CacheView::Read(points)), Some(whole)) = (&codes.zero_point, &parts.zero_point) {
            assert_eq!(gather(points), bytes(whole));
        }
    }
}

fn codes_are_absent(form: &KvCacheForm, dtype: DType) -> bool {
    (form.k_codes.is_none() || form.v_codes.is_none()) && dtype == form.dtype
}

/// The bytes of a tensor of 1 or 4 bytes an element, row-major.
fn bytes(view: &View<'_>) -> Vec<u8> {
    match view.dtype().size_bytes() {
        1 => view.reinterpreted("x", DType::U8).unwrap().lines::<u8>("x").unwrap().elements().collect(),
        _ => view.lines::<f32>("x").unwrap().elements().flat_map(f32::to_ne_bytes).collect(),
    }
}

fn form(num_pages: usize, page_size: usize, dtype: DType) -> KvCacheForm {
    KvCacheForm { head_dim_v: DIM_V, ..KvCacheForm::new(num_pages, page_size, KV_HEADS, DIM, dtype) }
}

/// Thousands of random steps; then everything is freed.
fn random_program<T: Real>(form: KvCacheForm, steps: usize) {
    let engine = engine();
    for seed in 0..2 {
        let mut world = World::<T>::new(form, 7 * seed + form.page_size as u32);
        for n in 0..steps {
            world.step(&engine, n);
        }
        let ids: Vec<SequenceId> = world.model.keys().copied().collect();
        for id in ids {
            world.cache.free(id).unwrap();
        }
        assert_eq!((world.cache.free_pages(), world.cache.num_sequences()), (form.num_pages, 0));
    }
}

#[test]
fn a_random_program_has_the_bits_of_whole_tensors() {
    for (num_pages, page_size) in [(16, 4), (40, 1), (7, 16)] {
        random_program::<f32>(form(num_pages, page_size, DType::F32), 4000);
    }
    random_program::<bf16>(form(16, 5, DType::BF16), 4000);
}

#[test]
fn a_random_program_has_the_codes_of_whole_tensors() {
    let (token, block) = (Some(Granularity::Token), Some(Granularity::Block(8)));
    for (k, v) in [
        (Some(scheme(Format::Int8, token)), Some(scheme(Format::Int8, token))),
        (Some(scheme(Format::Uint8, token)), Some(scheme(Format::Int4, block))),
        (Some(scheme(Format::E4m3fn, block)), None),
        (None, Some(scheme(Format::E5m2, token))),
        (Some(scheme(Format::Mxfp8, None)), Some(scheme(Format::Mxfp4, None))),
        (Some(scheme(Format::Nvfp4, None)), Some(scheme(Format::Nvfp4, None))),
    ] {
        let global =
            |scheme: Option<Scheme>| scheme.filter(|scheme| scheme.format().has_global_scale()).map(|_| GLOBAL);
        let (k_global_scale, v_global_scale) = (global(k), global(v));
        let form = KvCacheForm { k_codes: k, v_codes: v, k_global_scale, v_global_scale, ..form(16, 4, DType::F32) };
        random_program::<f32>(form, 1500);
        if k.is_some() && v.is_some() {
            random_program::<f16>(form, 500);
        }
    }
}

/// Keys and values of one number each, for `n` keys.
fn constant(x: f32, n: usize) -> [Vec<f32>; 2] {
    [DIM, DIM_V].map(|dim| vec![x; n * KV_HEADS * dim])
}

fn append(cache: &mut KvCache, id: SequenceId, [k, v]: &[Vec<f32>; 2]) -> Result<(), QuantError> {
    let n = k.len() / (KV_HEADS * DIM);
    cache.append(id, &view(k, &[n, KV_HEADS, DIM]), &view(v, &[n, KV_HEADS, DIM_V]))
}

/// The first element of the key of each row that a sequence has.
fn firsts(cache: &KvCache, id: SequenceId) -> Vec<f32> {
    let (table, page_size) = (cache.page_table(&[id]).unwrap().to_vec::<i32>().unwrap(), cache.form().page_size);
    let pages = cache.k_pages().unwrap();
    let key = |j: usize| pages.index(0, table[j / page_size] as usize).index(0, j % page_size).index(0, 0);
    (0..cache.length(id).unwrap()).map(|j| key(j).lines::<f32>("k").unwrap().line(0).next().unwrap()).collect()
}

#[test]
fn forked_sequences_share_pages_and_do_not_see_each_others_appends() {
    let mut cache = KvCache::new(form(8, 4, DType::F32)).unwrap();
    let first = cache.new_sequence();
    append(&mut cache, first, &constant(1.0, 6)).unwrap();
    let second = cache.fork(first).unwrap();
    let third = cache.fork(second).unwrap();
    assert_eq!(cache.free_pages(), 6, "a fork takes no page");
    // The last page is shared by three: two copies, and the third writes in place.
    for (id, x, free) in [(second, 2.0, 5), (first, 3.0, 4), (third, 4.0, 4)] {
        append(&mut cache, id, &constant(x, 1)).unwrap();
        assert_eq!(cache.free_pages(), free);
    }
    for (id, x) in [(first, 3.0), (second, 2.0), (third, 4.0)] {
        assert_eq!(firsts(&cache, id), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, x]);
    }
    let tables = cache.page_table(&[first, second, third]).unwrap().to_vec::<i32>().unwrap();
    assert!(tables[0] == tables[2] && tables[2] == tables[4], "the full page is one: {tables:?}");
    // A fork that is cut inside a shared page writes over no key of the others, nor do two that write at once.
    cache.truncate(second, 2).unwrap();
    let [k, v] = [DIM, DIM_V]
        .map(|dim| (0..3 * KV_HEADS * dim).map(|n| 5.0 + (n / (KV_HEADS * dim)) as f32).collect::<Vec<_>>());
    let (k, v) = (view(&k, &[3, 1, KV_HEADS, DIM]), view(&v, &[3, 1, KV_HEADS, DIM_V]));
    cache.append_batch(&[second, third, first], &k, &v).unwrap();
    assert_eq!(firsts(&cache, second), [1.0, 1.0, 5.0]);
    assert_eq!(firsts(&cache, third), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 6.0]);
    assert_eq!(firsts(&cache, first), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 7.0]);
    for (id, free) in [(third, 5), (first, 7), (second, 8)] {
        cache.free(id).unwrap();
        assert_eq!(cache.free_pages(), free);
    }
}

#[test]
fn an_append_that_is_refused_changes_nothing() {
    let token = Some(scheme(Format::Int8, Some(Granularity::Token)));
    for form in [form(3, 4, DType::F32), KvCacheForm { k_codes: token, v_codes: token, ..form(3, 4, DType::F32) }] {
        let mut cache = KvCache::new(form).unwrap();
        let (id, other) = (cache.new_sequence(), cache.new_sequence());
        append(&mut cache, id, &constant(1.0, 5)).unwrap();
        append(&mut cache, other, &constant(2.0, 2)).unwrap();
        let fork = cache.fork(id).unwrap();
        let whole = |cache: &KvCache| {
            let pages = [cache.k_pages().unwrap(), cache.v_pages().unwrap()].map(|view| bytes(&view));
            let table = cache.page_table(&[id, other, fork]).unwrap().to_vec::<i32>().unwrap();
            (pages, table, cache.free_pages(), [id, other, fork].map(|id| cache.length(id).unwrap()))
        };
        let before = whole(&cache);
        assert_eq!(core(append(&mut cache, other, &constant(9.0, 3))), Error::OutOfPages { needed: 1, free: 0 });
        assert_eq!(core(append(&mut cache, id, &constant(9.0, 1))), Error::OutOfPages { needed: 1, free: 0 });
        let [k, v] = constant(9.0, 3 * 3);
        let (k, v) = (view(&k, &[3, 3, KV_HEADS, DIM]), view(&v, &[3, 3, KV_HEADS, DIM_V]));
        let error = core(cache.append_batch(&[other, id, fork], &k, &v));
        assert_eq!(error, Error::OutOfPages { needed: 2, free: 0 }, "one for the fifth key of other, one for a copy");
        assert_eq!(error.kind(), ErrorKind::Device);
        // More keys than an address space has, of one number in memory.
        let one = [9f32];
        let far = |dim: usize| View::strided("x", &one, 0, [1 << 40, KV_HEADS, dim].into(), [0, 0, 0].into()).unwrap();
        assert!(matches!(core(cache.append(other, &far(DIM), &far(DIM_V))), Error::OutOfPages { free: 0, .. }));
        if token == cache.form().k_codes {
            let [k, mut v] = constant(9.0, 1);
            v[KV_HEADS * DIM_V - 1] = f32::NAN;
            let error = append(&mut cache, other, &[k, v]).unwrap_err();
            assert!(matches!(error, QuantError::NoCode { what: "NaN", .. }), "{error}");
        }
        assert_eq!(whole(&cache), before);
        append(&mut cache, other, &constant(9.0, 2)).unwrap();
        append(&mut cache, other, &constant(9.0, 0)).unwrap();
        assert_eq!(cache.length(other), Ok(4));
    }
}

#[test]
fn what_is_not_of_the_cache_is_refused_by_its_name() {
    let mut cache = KvCache::new(form(4, 4, DType::F32)).unwrap();
    let mut other_cache = KvCache::new(form(4, 4, DType::F32)).unwrap();
    let (id, elsewhere) = (cache.new_sequence(), other_cache.new_sequence());
    let error = core(append(&mut cache, elsewhere, &constant(1.0, 1)));
    assert_eq!(error, Error::UnknownSequence { sequence: elsewhere.number() });
    assert_eq!((error.kind(), error.tensor()), (ErrorKind::Index, None));
    assert_eq!(SequenceId::from_number(id.number()), id);
    cache.free(id).unwrap();
    let unknown = Error::UnknownSequence { sequence: id.number() };
    assert_eq!(cache.fork(id), Err(unknown.clone()));
    assert_eq!(cache.truncate(id, 0), Err(unknown.clone()));
    assert_eq!(cache.page_table(&[id]).unwrap_err(), unknown);
    assert_eq!(cache.cache_seqlens(&[id]).unwrap_err(), unknown);
    assert!(cache.new_sequence() > id, "an id does not come again");

    let id = cache.new_sequence();
    append(&mut cache, id, &constant(1.0, 5)).unwrap();
    let error = cache.truncate(id, 6).unwrap_err();
    assert!(matches!(error, Error::Option { option: "length", .. }), "{error}");
    let numbers = vec![1f32; 64 * DIM];
    let of = |shape: &[usize]| view(&numbers, shape);
    let (k, v) = (of(&[1, KV_HEADS, DIM]), of(&[1, KV_HEADS, DIM_V]));
    let halves = vec![f16::ONE; KV_HEADS * DIM];
    let bytes = vec![1u8; KV_HEADS * DIM];
    let mut refused = |k: &View<'_>, v: &View<'_>| core(cache.append(id, k, v));
    assert!(matches!(refused(&of(&[KV_HEADS, DIM]), &v), Error::Rank { tensor: "k", got: 2, .. }));
    assert!(matches!(refused(&k, &of(&[1, 1, KV_HEADS, DIM_V])), Error::Rank { tensor: "v", got: 4, .. }));
    let sizes = |error: Error| match error {
        Error::SizeMismatch { tensor, size, got, other, expected } => (tensor, size, got, other, expected),
        other => panic!("{other}"),
    };
    assert_eq!(sizes(refused(&of(&[1, 3, DIM]), &v)), ("k", "num_kv_heads", 3, "k_cache", KV_HEADS));
    assert_eq!(sizes(refused(&k, &of(&[1, KV_HEADS, DIM]))), ("v", "head_dim", DIM, "v_cache", DIM_V));
    assert_eq!(sizes(refused(&k, &of(&[2, KV_HEADS, DIM_V]))), ("v", "new keys", 2, "k", 1));
    let half = view(&halves, &[1, KV_HEADS, DIM]);
    assert_eq!(refused(&half, &v), Error::OtherDtype { tensor: "k", expected: DType::F32, got: DType::F16 });
    let (k, v) = (of(&[2, 1, KV_HEADS, DIM]), of(&[2, 1, KV_HEADS, DIM_V]));
    assert_eq!(sizes(core(cache.append_batch(&[id], &k, &v))), ("k", "batch", 2, "ids", 1));
    assert!(matches!(core(cache.append_batch(&[id, id], &k, &v)), Error::Option { option: "ids", .. }));
    let codes = Some(scheme(Format::Int8, Some(Granularity::Token)));
    let mut coded = KvCache::new(KvCacheForm { k_codes: codes, ..form(4, 4, DType::F32) }).unwrap();
    let id = coded.new_sequence();
    let (k, v) = (view(&bytes, &[1, KV_HEADS, DIM]), of(&[1, KV_HEADS, DIM_V]));
    assert!(matches!(core(coded.append(id, &k, &v)), Error::UnsupportedDtype { tensor: "k", got: DType::U8, .. }));
}

#[test]
fn forms_that_cannot_be_are_refused_and_say_what_to_use() {
    let refused = |form: KvCacheForm| core(KvCache::new(form));
    let plain = form(4, 4, DType::F32);
    for (form, name) in [
        (KvCacheForm { num_pages: 0, ..plain }, "num_pages"),
        (KvCacheForm { page_size: 0, ..plain }, "page_size"),
        (KvCacheForm { num_kv_heads: 0, ..plain }, "num_kv_heads"),
        (KvCacheForm { head_dim: 0, ..plain }, "head_dim"),
        (KvCacheForm { head_dim_v: 0, ..plain }, "head_dim_v"),
        (KvCacheForm { num_pages: 1 << 20, page_size: 1 << 11, ..plain }, "num_pages"),
        (KvCacheForm { num_pages: usize::MAX, ..plain }, "num_pages"),
    ] {
        let error = refused(form);
        assert!(matches!(error, Error::Option { option, .. } if option == name), "{error}");
    }
    let error = refused(KvCacheForm { dtype: DType::I32, ..plain });
    assert!(matches!(error, Error::UnsupportedDtype { tensor: "k", got: DType::I32, .. }), "{error}");
    // 2⁶⁰ bytes; and more elements than there are addresses.
    let far = |head_dim| KvCacheForm { num_pages: 1 << 20, num_kv_heads: 1 << 18, head_dim, ..plain };
    assert!(matches!(refused(far(1 << 18)), Error::OutOfMemory { .. }));
    assert!(matches!(refused(far(1 << 40)), Error::Overflow { tensor: "k_cache", .. }));
    let nvfp4 = KvCacheForm { v_codes: Some(scheme(Format::Nvfp4, None)), ..plain };
    let error = refused(nvfp4);
    assert!(matches!(error, Error::MissingPart { tensor: "v", part: "v_global_scale", .. }), "{error}");
    let error = refused(KvCacheForm { k_global_scale: Some(1.0), ..plain });
    assert!(matches!(error, Error::UnexpectedPart { tensor: "k", part: "k_global_scale", .. }), "{error}");
    for got in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = KvCache::new(KvCacheForm { v_global_scale: Some(got), ..nvfp4 }).unwrap_err();
        assert!(matches!(error, QuantError::BadScale { .. }), "{error}");
    }
    let swizzled = Scheme::new(Format::Mxfp8, None, ScaleLayout::Swizzle32x4x4).unwrap();
    for (codes, what, use_this) in [
        (scheme(Format::Int8, None), "factors by tensor", "token or block"),
        (scheme(Format::Int8, Some(Granularity::Head)), "factors by head", "token or block"),
        (scheme(Format::E4m3fn, Some(Granularity::Channel)), "factors by channel", "token or block"),
        (swizzled, "swizzle_32_4_4", "plain"),
    ] {
        for form in [KvCacheForm { k_codes: Some(codes), ..plain }, KvCacheForm { v_codes: Some(codes), ..plain }] {
            let error = refused(form);
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(what) && text.contains(use_this), "{text}");
        }
    }
}

#[test]
fn attention_reads_a_shared_cache_and_says_what_does_not_fit() {
    let engine = engine();
    let mut cache = KvCache::new(form(8, 4, DType::F32)).unwrap();
    let (id, empty) = (cache.new_sequence(), cache.new_sequence());
    append(&mut cache, id, &constant(0.5, 9)).unwrap();
    let cache = &cache;
    let attend_by = |ids: &[SequenceId], batch: usize, compute: Compute| {
        let (q, mut out, mut lse) =
            (vec![1f32; batch * HEADS * DIM], vec![f32::NAN; batch * HEADS * DIM_V], vec![f32::NAN; batch * HEADS]);
        let queries = KvCacheQueries {
            lse: Some(ViewMut::contiguous("lse", &mut lse, [batch, HEADS, 1].into()).unwrap()),
            ..KvCacheQueries::new(
                view(&q, &[batch, 1, HEADS, DIM]),
                ids,
                ViewMut::contiguous("out", &mut out, [batch, 1, HEADS, DIM_V].into()).unwrap(),
            )
        };
        let options = Options::default().with_compute(compute);
        let done = cache.attention(&engine, queries, &options, &Queue::Host(engine.executor()));
        assert!(done.is_ok() || out.iter().chain(&lse).all(|x| x.is_nan()), "nothing is written");
        done.map(|()| (out, lse))
    };
    let attend = |ids: &[SequenceId], batch: usize| attend_by(ids, batch, Compute::Exact);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let (out, lse) = attend(&[empty, id, id], 3).unwrap();
                    assert!(out[..HEADS * DIM_V].iter().all(|&x| x == 0.0), "no keys: zeros");
                    assert!(lse[..HEADS].iter().all(|&x| x == f32::NEG_INFINITY));
                    assert!(out[HEADS * DIM_V..].iter().all(|&x| (x - 0.5).abs() < 1e-6));
                }
            });
        }
    });
    let (q, ids, mut out) = (vec![1f32; 3 * HEADS * DIM], [empty, id, id], vec![f32::NAN; 3 * HEADS * DIM_V]);
    let place = ViewMut::contiguous("out", &mut out, [3, 1, HEADS, DIM_V].into()).unwrap();
    let queries = KvCacheQueries::new(view(&q, &[3, 1, HEADS, DIM]), &ids, place);
    let plan = cache.explain(&engine, queries, &Options::default(), 2).unwrap();
    let parts: Vec<_> = plan.parts().iter().map(|part| (part.plan().key().kernel, part.sequences())).collect();
    assert_eq!(parts, [(Kernel::Empty, &[0][..]), (Kernel::Decode, &[1, 2])]);
    assert!(out.iter().all(|x| x.is_nan()), "nothing is written");
    assert!(attend(&[empty], 1).is_ok(), "a page table without entries");
    assert!(attend(&[], 0).is_ok());
    let error = core(attend(&[id], 2));
    assert!(matches!(error, Error::SizeMismatch { tensor: "ids", got: 1, other: "q", expected: 2, .. }), "{error}");
    let error = core(attend(&[SequenceId::from_number(u64::MAX)], 1));
    assert_eq!(error, Error::UnknownSequence { sequence: u64::MAX });
    for (compute, says) in [(Compute::Int8, "a cache that grows"), (Compute::Fp8, "compute=\"fp8\"")] {
        let error = core(attend_by(&[id], 1, compute));
        assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains(says)), "{error}");
    }
}

#[test]
fn new_keys_may_lie_anywhere() {
    let mut cache = KvCache::new(form(4, 4, DType::F32)).unwrap();
    let id = cache.new_sequence();
    // Heads outermost, keys from the last to the first.
    let data: Vec<f32> = (0..KV_HEADS * 6 * DIM).map(|n| n as f32).collect();
    let reversed = |dim: usize| {
        let strides = [-(DIM as isize), 6 * DIM as isize, 1];
        View::strided("x", &data, 5 * DIM, [6, KV_HEADS, dim].into(), strides.into()).unwrap()
    };
    cache.append(id, &reversed(DIM), &reversed(DIM_V)).unwrap();
    assert_eq!(firsts(&cache, id), [5, 4, 3, 2, 1, 0].map(|n| (n * DIM) as f32));
}
