//! Weights from a checkpoint to the device.

use flint_backend::{Backend, Element, Precision};
use flint_weights::config::{Attention, FeedForward};
use flint_weights::{Checkpoint, QuantMatrix};

use crate::bank::{Bank, BankOptions, ExpertBank, Experts, identity_slots};
use crate::dsa::{Dsa, Indexer};
use crate::feed::{Dense, Feed, Sparse};
use crate::glm::{Glm, GlmOptions, Layer, Mixer, Weights};
use crate::hyper::Site;
use crate::kda::Kda;
use crate::language::{Error, Result};

/// Residual streams that the kernels mix.
const STREAMS: usize = 4;

impl<B: Backend> Glm<B> {
    /// Uploads every weight of the text trunk, or every one but the routed experts that are streamed.
    ///
    /// `progress` is called with the bytes that are on the device and the bytes that will be.
    ///
    /// # Errors
    /// When the checkpoint is damaged, an option is out of range, or the backend refuses a matrix or runs out of memory.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: B,
        options: GlmOptions,
        experts: Experts,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let config = checkpoint.config().clone();
        check(&config, options)?;
        let arithmetic_id = arithmetic_id(&checkpoint.manifest_digest(), &backend.arithmetic());
        let all = checkpoint.trunk_bytes();
        let bank = match experts {
            Experts::Resident => None,
            Experts::Streamed(stream, options) => {
                Some((Bank::new(*stream, config.experts, &options), options))
            }
        };
        let mut loader = Loader { checkpoint, backend, bank, done: 0, all, progress };
        let weights = loader.weights()?;
        (loader.progress)(all, all);
        let bank = loader.bank.map(|(bank, _)| bank);
        Self::assemble(loader.backend, config, (weights, bank), options, arithmetic_id)
    }
}

/// A short name of the weights and the arithmetic together.
fn arithmetic_id(manifest: &str, arithmetic: &str) -> String {
    let digest = blake3::hash(format!("{manifest}\n{arithmetic}").as_bytes());
    format!("flint-{}-{arithmetic}", &digest.to_hex()[..12])
}

/// What the network's operations cannot do.
fn check(config: &flint_weights::ModelConfig, options: GlmOptions) -> Result<()> {
    let refuse = |what: String| Err(Error::Unsupported(what));
    if config.streams != STREAMS {
        return refuse(format!("hc_mult is {}, the kernels mix {STREAMS} streams", config.streams));
    }
    if options.context == 0 || options.context > config.max_positions {
        let (asked, most) = (options.context, config.max_positions);
        return refuse(format!(
            "a context of {asked} tokens was asked for, the model has 1 to {most} positions"
        ));
    }
    if options.rows == 0 || options.sequences == 0 {
        return refuse("a forward needs at least one row and one sequence".into());
    }
    let first = config.attention.iter().position(|a| *a == Attention::Dsa);
    match first {
        Some(layer) if !config.own_indexer[layer] => {
            refuse(format!("layers.{layer} shares an indexer's selection, but no layer before it has one"))
        }
        _ => Ok(()),
    }
}

struct Loader<'a, B: Backend> {
    checkpoint: &'a Checkpoint,
    backend: B,
    /// For experts that are streamed.
    bank: Option<(Bank, BankOptions)>,
    done: u64,
    all: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<B: Backend> Loader<'_, B> {
    fn weights(&mut self) -> Result<Weights<B>> {
        let embedding = self.product(&["embed_tokens"])?;
        let slots = identity_slots(&mut self.backend, self.checkpoint.config().experts)?;
        let count = self.checkpoint.config().layers();
        let layers = (0..count).map(|layer| self.layer(layer, &slots)).collect::<Result<_>>()?;
        Ok(Weights { embedding, layers, norm: self.vector("norm")?, head: self.product(&["lm_head"])? })
    }

    fn layer(&mut self, index: usize, slots: &B::Buffer) -> Result<Layer<B>> {
        let name = format!("layers.{index}");
        let config = self.checkpoint.config();
        let (attention, feed) = (config.attention[index], config.feed_forward[index]);
        Ok(Layer {
            attention_site: self.site(&name, "hc_attn", "input_layernorm")?,
            mixer: match attention {
                Attention::Kda => Mixer::Kda(self.kda(&format!("{name}.self_attn"))?),
                Attention::Dsa => Mixer::Dsa(self.dsa(index, &format!("{name}.self_attn"))?),
            },
            feed_site: self.site(&name, "hc_ffn", "post_attention_layernorm")?,
            feed: match feed {
                FeedForward::Dense => Feed::Dense(
                    self.dense(&format!("{name}.mlp"), self.checkpoint.config().intermediate_size)?,
                ),
                FeedForward::Sparse => Feed::Sparse(self.sparse(index, slots)?),
            },
        })
    }

    fn site(&mut self, layer: &str, site: &str, norm: &str) -> Result<Site<B>> {
        let function = self.checkpoint.matrix(&format!("{layer}.{site}_fn"))?;
        Ok(Site {
            function: self.upload(&[function], Precision::Full)?,
            base: self.vector(&format!("{layer}.{site}_base"))?,
            scale: self.vector(&format!("{layer}.{site}_scale"))?,
            norm: self.vector(&format!("{layer}.{norm}"))?,
        })
    }

    fn kda(&mut self, name: &str) -> Result<Kda<B>> {
        let under = |part: &str| format!("{name}.{part}");
        let input = ["q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj"].map(under);
        Ok(Kda {
            input: self.product(&input)?,
            forget: self.product(&[under("f_b_proj")])?,
            gate: self.product(&[under("g_b_proj")])?,
            output: self.product(&[under("o_proj")])?,
            taps: self.vector(&under("conv1d"))?,
            dt_bias: self.vector(&under("dt_bias"))?,
            a_log: self.vector(&under("A_log"))?,
            norm: self.vector(&under("o_norm"))?,
        })
    }

    fn dsa(&mut self, layer: usize, name: &str) -> Result<Dsa<B>> {
        let under = |part: &str| format!("{name}.{part}");
        let mut input = vec![under("q_a_proj"), under("kv_a_proj_with_mqa")];
        let mut query = vec![under("q_b_proj")];
        let own = self.checkpoint.config().own_indexer[layer];
        if own {
            let index = ["wk", "index_kpool_compress_gate", "weights_proj"];
            input.extend(index.map(|part| under(&format!("indexer.{part}"))));
            query.push(under("indexer.wq_b"));
        }
        let heads = self.checkpoint.latent_heads(layer)?;
        let indexer = if own { Some(self.indexer(&under("indexer"))?) } else { None };
        Ok(Dsa {
            input: self.product(&input)?,
            query_norm: self.vector(&under("q_a_layernorm"))?,
            latent_norm: self.vector(&under("kv_a_layernorm"))?,
            query: self.product(&query)?,
            absorb: self.stack(&singles(heads.absorb))?,
            expand: self.stack(&singles(heads.expand))?,
            output: self.product(&[under("o_proj")])?,
            indexer,
        })
    }

    fn indexer(&mut self, name: &str) -> Result<Indexer<B>> {
        Ok(Indexer {
            norm: self.vector(&format!("{name}.k_norm"))?,
            norm_bias: self.vector(&format!("{name}.k_norm.bias"))?,
            ape: self.vector(&format!("{name}.index_kpool_compress_ape"))?,
        })
    }

    fn dense(&mut self, name: &str, width: usize) -> Result<Dense<B>> {
        Ok(Dense {
            gate_up: self.product(&[format!("{name}.gate_proj"), format!("{name}.up_proj")])?,
            down: self.product(&[format!("{name}.down_proj")])?,
            width,
        })
    }

    fn sparse(&mut self, layer: usize, slots: &B::Buffer) -> Result<Sparse<B>> {
        let name = format!("layers.{layer}.mlp");
        let config = self.checkpoint.config();
        let shared_width = config.moe_intermediate_size * config.shared_experts;
        let router = self.checkpoint.matrix(&format!("{name}.gate"))?;
        Ok(Sparse {
            router: self.upload(&[router], Precision::Full)?,
            bias: self.vector(&format!("{name}.gate.e_score_correction_bias"))?,
            experts: self.experts(layer, &name, slots)?,
            shared: self.dense(&format!("{name}.shared_experts"), shared_width)?,
        })
    }

    /// A layer's routed experts: all of them with the identity for a slot table, or slots with a table of their own.
    fn experts(&mut self, layer: usize, name: &str, identity: &B::Buffer) -> Result<ExpertBank<B>> {
        if let Some((bank, options)) = &mut self.bank {
            let table = identity_slots(&mut self.backend, self.checkpoint.config().experts)?;
            return bank.add_layer(&mut self.backend, layer, table, options);
        }
        let experts = |part: &str| self.checkpoint.stack(&format!("{name}.experts.{part}"));
        let gate_up = experts("gate_proj")?.into_iter().zip(experts("up_proj")?).map(|(g, u)| vec![g, u]);
        let (gate_up, down) = (gate_up.collect::<Vec<_>>(), experts("down_proj")?);
        let gate_up = self.stack(&gate_up)?;
        let down = self.stack(&singles(down))?;
        Ok(ExpertBank { gate_up, down, slots: identity.clone() })
    }

    /// The named matrices, one below the other, in the product arithmetic.
    fn product(&mut self, names: &[impl AsRef<str>]) -> Result<B::Matrix> {
        let parts = names
            .iter()
            .map(|name| Ok(self.checkpoint.matrix(name.as_ref())?))
            .collect::<Result<Vec<_>>>()?;
        self.upload(&parts, Precision::Product)
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<B::Matrix> {
        let matrix = self.backend.upload(parts, precision)?;
        self.count(parts.iter().map(QuantMatrix::bytes).sum());
        Ok(matrix)
    }

    fn stack(&mut self, members: &[Vec<QuantMatrix>]) -> Result<B::Matrix> {
        let matrix = self.backend.upload_stack(members, Precision::Product)?;
        self.count(members.iter().flatten().map(QuantMatrix::bytes).sum());
        Ok(matrix)
    }

    fn vector(&mut self, name: &str) -> Result<B::Buffer> {
        let values = self.checkpoint.vector(name)?;
        let buffer = self.backend.allocate(Element::F32, values.len())?;
        self.backend.write_f32(&buffer, 0, &values)?;
        Ok(buffer)
    }

    fn count(&mut self, bytes: usize) {
        self.done = (self.done + bytes as u64).min(self.all);
        (self.progress)(self.done, self.all);
    }
}

/// Members of one part each.
fn singles(members: Vec<QuantMatrix>) -> Vec<Vec<QuantMatrix>> {
    members.into_iter().map(|member| vec![member]).collect()
}
