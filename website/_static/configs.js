/** Find the page's model that a config.json describes: compare the fields that decide about memory. */

const REFUSED = ["quantization_config", "auto_map"]; // quantized weights, and custom code

/**
 * Return the differences as [field, there, here]; empty if a training takes the same bytes.
 * @param {object} given a config.json's content
 * @param {object} model an entry of the index: its `config`, and its type's `defaults` for fields that a file lacks
 */
export function differences(given, { config, defaults }) {
  const there = { ...defaults, ...given };
  there.num_key_value_heads ??= there.num_attention_heads;
  there.head_dim ??= there.hidden_size / there.num_attention_heads;
  if (!there.use_sliding_window && "use_sliding_window" in config) there.sliding_window = null;
  const found = Object.entries(config).filter(([name, value]) => JSON.stringify(there[name]) !== JSON.stringify(value));
  const extra = REFUSED.filter((name) => given[name]).map((name) => [name, "given", "none"]);
  return [...found.map(([name, value]) => [name, there[name], value]), ...extra];
}

/**
 * Return the name of the nearest model of the same type, with the differences.
 * @throws {SyntaxError} if the text is not a config.json of a type that the page has
 */
export function nearest(text, models) {
  const given = JSON.parse(text);
  const types = [...new Set(Object.values(models).map(({ config }) => config.model_type))];
  if (!types.includes(given?.model_type)) throw new SyntaxError(`its model_type is none of ${types.join(", ")}`);
  const same = Object.entries(models).filter(([, { config }]) => config.model_type === given.model_type);
  const found = same.map(([name, model]) => [name, differences(given, model)]);
  return found.sort(([, one], [, other]) => one.length - other.length)[0];
}
