// A table that is data alone: a refresh changes what differs, so that the focus stays on the button that has it.
export default {
  template: `
    <div class="folding" role="region" :aria-label="label">
      <table role="table">
        <thead role="rowgroup">
          <tr role="row">
            <th v-for="col in columns" :key="col.field" role="columnheader" scope="col" :class="'is-' + col.kind">
              {{ col.label }}
            </th>
          </tr>
        </thead>
        <tbody role="rowgroup">
          <tr v-for="row in rows" :key="row.key" role="row">
            <td v-for="col in columns" :key="col.field" role="cell" :data-label="col.label" :class="['is-' + col.kind, {
                'is-none': isNone(row[col.field]), ['has-' + Math.min(3, row[col.field]?.length || 0)]: col.kind === 'acts'}]">
              <span v-if="col.kind === 'chips'" class="chips">
                <span v-for="(chip, i) in row[col.field]" :key="i" :class="['chip', 'chip-' + chip.tone, {'chip-short': parts(chip.text).length < 2}]" :title="chip.title"
                  ><template v-for="(part, j) in parts(chip.text)" :key="j"><wbr v-if="j">{{ part }}</template></span>
              </span>
              <span v-else-if="col.kind === 'bar' && row[col.field]" class="meter">
                <span class="meter-track" role="meter" aria-valuemin="0" aria-valuemax="100"
                  :aria-valuenow="percent(row[col.field])" :aria-label="col.label + ': ' + row[col.field].text">
                  <span :class="'meter-fill meter-' + row[col.field].tone"
                    :style="{width: percent(row[col.field]) + '%'}"></span>
                </span>
                <span>{{ row[col.field].text }}</span>
              </span>
              <span v-else-if="col.kind === 'acts'" class="acts">
                <button v-for="act in row[col.field]" :key="act.act" type="button" :class="'act act-' + act.tone"
                  :aria-label="act.label + ': ' + row.name" @click="$emit('act', {act: act.act, key: row.key})">
                  {{ act.label }}
                </button>
              </span>
              <time v-else-if="col.kind === 'time' && row[col.field]" :datetime="row[col.field].title"
                :title="row[col.field].title">{{ row[col.field].text }}</time>
              <span v-else><template v-for="(part, j) in parts(row[col.field] || '-')" :key="j"
                ><wbr v-if="j">{{ part }}</template></span>
            </td>
          </tr>
        </tbody>
      </table>
      <p v-if="!rows.length" class="empty">{{ empty }}</p>
    </div>
  `,
  props: {columns: Array, rows: Array, label: String, empty: String},
  emits: ["act"],
  methods: {
    isNone(cell) {
      return !cell || cell === "-" || cell.length === 0;
    },
    // Where a long name may break into lines: after a slash, after what joins words, before a replica, whose port stays.
    parts(text) {
      return text.length < 18 ? [text] : text.split(/(?<=\S[/_])(?=\S)|(?=@)/);
    },
    percent(bar) {
      return Math.round(100 * Math.min(1, Math.max(0, bar.share)));
    },
  },
};
